//! The shape of a matrix whose groups run along one axis.

use crate::blocks::NVFP4_GROUP;
use crate::exponent::Element;
use crate::packed::packed_len;

/// Values per group of the MX formats.
pub const MX_GROUP: usize = 32;

/// The direction in which the values of a group follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Along each row, for a contraction over the columns.
    Rows,
    /// Down each column, for a contraction over the rows.
    Columns,
}

/// The shape of a grouped matrix: `rows` by `cols` values in groups of `group` along `axis`.
///
/// Groups are counted from the first value of their *line*, a row or a column of the matrix; the
/// last one of a line may be shorter. Codes and scales lie line by line, that is, transposed if
/// groups run down the columns: 4-bit MMAs read both operands along the contraction only, so each
/// orientation of a matrix is a copy of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// The direction of the groups.
    pub axis: Axis,
    /// The codes' format.
    pub element: Element,
    /// Values per group.
    pub group: usize,
}

impl GroupShape {
    /// MXFP8: E4M3 in groups of 32.
    pub const fn mxfp8(rows: usize, cols: usize, axis: Axis) -> Self {
        Self::new(rows, cols, axis, Element::E4M3, MX_GROUP)
    }

    /// MXFP4: E2M1 in groups of 32.
    pub const fn mxfp4(rows: usize, cols: usize, axis: Axis) -> Self {
        Self::new(rows, cols, axis, Element::E2M1, MX_GROUP)
    }

    /// NVFP4: E2M1 in groups of 16.
    pub const fn nvfp4(rows: usize, cols: usize, axis: Axis) -> Self {
        Self::new(rows, cols, axis, Element::E2M1, NVFP4_GROUP)
    }

    /// One group per row: an exponent per token, or per key on the other operand.
    pub const fn per_row(rows: usize, cols: usize, element: Element) -> Self {
        Self::new(rows, cols, Axis::Rows, element, cols)
    }

    const fn new(rows: usize, cols: usize, axis: Axis, element: Element, group: usize) -> Self {
        Self {
            rows,
            cols,
            axis,
            element,
            group,
        }
    }

    /// Lines of codes: rows, or columns if groups run down them.
    pub const fn lines(&self) -> usize {
        match self.axis {
            Axis::Rows => self.rows,
            Axis::Columns => self.cols,
        }
    }

    /// Values of one line.
    pub const fn line(&self) -> usize {
        match self.axis {
            Axis::Rows => self.cols,
            Axis::Columns => self.rows,
        }
    }

    /// Bytes of one line of codes. Every line starts a byte.
    pub const fn line_bytes(&self) -> usize {
        match self.element {
            Element::E4M3 => self.line(),
            Element::E2M1 => packed_len(self.line()),
        }
    }

    /// Scales of one line.
    ///
    /// # Panics
    /// If groups hold no values.
    pub const fn line_groups(&self) -> usize {
        self.line().div_ceil(self.group)
    }

    /// Bytes of all codes.
    pub const fn code_bytes(&self) -> usize {
        self.lines().saturating_mul(self.line_bytes())
    }

    /// The index in the row-major matrix of the `index`th value of `line`.
    pub(super) const fn place(&self, line: usize, index: usize) -> usize {
        match self.axis {
            Axis::Rows => line * self.cols + index,
            Axis::Columns => index * self.cols + line,
        }
    }
}
