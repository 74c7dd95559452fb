//! Where scales lie in memory: dense, or in the atoms that block-scaled MMAs read.
//!
//! An *atom* holds the scales of 128 rows and four consecutive groups of the contraction, 512
//! bytes: that of row `r` and group `g` is byte `(r % 32) · 16 + (r / 32) · 4 + g`. A matrix of scales is
//! padded to whole atoms, which follow one another along the groups first, then down the rows.
//! This is cuBLAS's layout of 1D block scaling factors, cuDNN's `F8_128x4` and what torchao calls
//! blocked or swizzled.

use thiserror::Error;

/// Rows of one atom.
pub const ATOM_ROWS: usize = 128;
/// Groups of the contraction in one atom.
pub const ATOM_GROUPS: usize = 4;
const ATOM_BYTES: usize = ATOM_ROWS * ATOM_GROUPS;

/// Rows that stand side by side in an atom's 16-byte lines are this far apart.
const ROWS_APART: usize = 32;
const LINE_BYTES: usize = 16;

/// How the scales of a matrix lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row-major `[rows, groups]`, no padding.
    Dense,
    /// Atoms of 128 rows by four groups.
    Atoms,
}

impl ScaleLayout {
    /// Bytes of `[rows, groups]` scales.
    pub const fn bytes(self, rows: usize, groups: usize) -> usize {
        match self {
            ScaleLayout::Dense => rows.saturating_mul(groups),
            ScaleLayout::Atoms => rows
                .div_ceil(ATOM_ROWS)
                .saturating_mul(groups.div_ceil(ATOM_GROUPS))
                .saturating_mul(ATOM_BYTES),
        }
    }
}

/// Bytes that cannot be a quantised matrix of the stated shape.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The codes are too many or too few.
    #[error(
        "{found} bytes of codes, but {lines} lines of {line} values with {bits} bits each take \
         {expected}; check the shape, the element format and the axis of the groups"
    )]
    Codes {
        /// Rows, or columns where groups run down the columns.
        lines: usize,
        /// Values of one line.
        line: usize,
        /// Bits of one code.
        bits: usize,
        /// Bytes that the shape asks for.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// The scales are too many or too few.
    #[error(
        "{found} bytes of scales, but {rows} rows of {groups} groups take {expected} in the layout \
         {layout:?}; check the shape, the group's length and whether the scales are swizzled"
    )]
    Scales {
        /// Rows of the matrix of scales.
        rows: usize,
        /// Scales of one row.
        groups: usize,
        /// The layout that they are said to have.
        layout: ScaleLayout,
        /// Bytes that the shape asks for.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A UE4M3 scale has its top bit set.
    #[error(
        "scale {index} is {byte:#04x}, a negative E4M3 number, where a UE4M3 scale has no sign; \
         check that these bytes are NVFP4 scales"
    )]
    SignedScale {
        /// Its index, in the dense layout.
        index: usize,
        /// The byte found.
        byte: u8,
    },
    /// A shape with groups of no values.
    #[error("groups of 0 values; MX groups have 32, NVFP4 groups 16")]
    EmptyGroup,
}

/// Where the scale of `row` and `group` stands among the atoms of a matrix with `groups` scales in
/// a row.
pub const fn atom_offset(row: usize, group: usize, groups: usize) -> usize {
    let atom = row / ATOM_ROWS * groups.div_ceil(ATOM_GROUPS) + group / ATOM_GROUPS;
    let (row, group) = (row % ATOM_ROWS, group % ATOM_GROUPS);
    atom * ATOM_BYTES + row % ROWS_APART * LINE_BYTES + row / ROWS_APART * ATOM_GROUPS + group
}

/// Puts dense `[rows, groups]` scales into atoms. The padding is zero.
///
/// A tile of 128 rows that starts anywhere takes its atoms from the rows of the dense table that
/// it covers, and a tile that the document ends in from fewer.
///
/// # Errors
/// [`LayoutError::Scales`] if `dense` does not hold `rows · groups` bytes.
pub fn to_atoms(dense: &[u8], rows: usize, groups: usize) -> Result<Vec<u8>, LayoutError> {
    check_scales(dense, rows, groups, ScaleLayout::Dense)?;
    let mut atoms = vec![0; ScaleLayout::Atoms.bytes(rows, groups)];
    for (index, &byte) in dense.iter().enumerate() {
        atoms[atom_offset(index / groups, index % groups, groups)] = byte;
    }
    Ok(atoms)
}

/// Takes dense `[rows, groups]` scales out of atoms; what the padding holds does not matter.
///
/// # Errors
/// [`LayoutError::Scales`] if `atoms` does not hold the atoms of `rows` rows and `groups` groups.
pub fn from_atoms(atoms: &[u8], rows: usize, groups: usize) -> Result<Vec<u8>, LayoutError> {
    check_scales(atoms, rows, groups, ScaleLayout::Atoms)?;
    Ok((0..rows)
        .flat_map(|row| (0..groups).map(move |group| atoms[atom_offset(row, group, groups)]))
        .collect())
}

fn check_scales(
    bytes: &[u8],
    rows: usize,
    groups: usize,
    layout: ScaleLayout,
) -> Result<(), LayoutError> {
    let expected = layout.bytes(rows, groups);
    if bytes.len() == expected {
        Ok(())
    } else {
        Err(LayoutError::Scales {
            rows,
            groups,
            layout,
            expected,
            found: bytes.len(),
        })
    }
}

/// Dense scales from either layout.
pub(crate) fn to_dense(
    bytes: &[u8],
    rows: usize,
    groups: usize,
    layout: ScaleLayout,
) -> Result<Vec<u8>, LayoutError> {
    match layout {
        ScaleLayout::Dense => {
            check_scales(bytes, rows, groups, layout)?;
            Ok(bytes.to_vec())
        }
        ScaleLayout::Atoms => from_atoms(bytes, rows, groups),
    }
}
