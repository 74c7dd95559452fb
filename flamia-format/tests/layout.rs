//! Scale layouts and other libraries' bytes, against tensors that torchao has made.

mod support;

use flamia_format::layout::{atom_offset, from_atoms, to_atoms};
use flamia_format::packed::{pack, packed_len, unpack};
use flamia_format::{
    Axis, E2M1, Element, ExponentRule, GroupShape, GroupedTensor, LayoutError, MxTensor,
    Nvfp4Tensor, ScaleLayout, TokenBlocks, Ue8m0,
};
use proptest::prelude::*;
use support::{assert_same, entries};

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().map(|&word| word.try_into().unwrap()).collect()
}

#[test]
fn atoms_equal_to_blocked() {
    let lines: Vec<Vec<u32>> = entries(include_str!("tables/torchao_blocked.txt")).collect();
    assert_eq!(lines.len(), 6);
    for pair in lines.chunks(2) {
        let (rows, groups) = (pair[0][0] as usize, pair[0][1] as usize);
        let dense: Vec<u8> = (0..rows * groups)
            .map(|index| ((37 * (index / groups) + 11 * (index % groups) + 1) % 251) as u8)
            .collect();
        let blocked = bytes(&pair[1]);
        assert_eq!(to_atoms(&dense, rows, groups).unwrap(), blocked);
        assert_eq!(from_atoms(&blocked, rows, groups).unwrap(), dense);
    }
}

/// A tensor of torchao's, see `scripts/torchao_tables.py`.
struct Foreign {
    shape: GroupShape,
    layout: ScaleLayout,
    /// The rule it was quantised with; none for NVFP4.
    rule: Option<ExponentRule>,
    tensor_scale: f32,
    input: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    dequantized: Vec<f32>,
}

fn foreign() -> Vec<Foreign> {
    let lines: Vec<Vec<u32>> = entries(include_str!("tables/torchao_tensors.txt")).collect();
    let tensors: Vec<Foreign> = lines
        .chunks(5)
        .map(|lines| {
            let [bits, group, rows, cols, swizzled, rule, tensor_scale] = lines[0][..] else {
                panic!("a head of {} words", lines[0].len());
            };
            let floats = |words: &[u32], shift: u32| {
                words
                    .iter()
                    .map(|&word| f32::from_bits(word << shift))
                    .collect()
            };
            let (rows, cols) = (rows as usize, cols as usize);
            Foreign {
                shape: match (bits, group) {
                    (8, 32) => GroupShape::mxfp8(rows, cols, Axis::Rows),
                    (4, 32) => GroupShape::mxfp4(rows, cols, Axis::Rows),
                    (4, 16) => GroupShape::nvfp4(rows, cols, Axis::Rows),
                    _ => panic!("{bits} bits in groups of {group}"),
                },
                layout: [ScaleLayout::Dense, ScaleLayout::Atoms][swizzled as usize],
                rule: [Some(ExponentRule::Up), Some(ExponentRule::Floor), None][rule as usize],
                tensor_scale: f32::from_bits(tensor_scale),
                input: floats(&lines[1], 16),
                codes: bytes(&lines[2]),
                scales: bytes(&lines[3]),
                dequantized: floats(&lines[4], 0),
            }
        })
        .collect();
    assert_eq!(tensors.len(), 10);
    tensors
}

#[test]
fn torchaos_tensors_are_read_and_written() {
    for t in foreign() {
        let (found, scales) = match t.rule {
            Some(_) => {
                let x = MxTensor::from_bytes(t.shape, &t.codes, &t.scales, t.layout).unwrap();
                (x.dequantize(), x.scale_bytes(t.layout).unwrap())
            }
            None => {
                let x = Nvfp4Tensor::from_bytes(t.shape, &t.codes, &t.scales, t.layout)
                    .unwrap()
                    .with_tensor_scale(t.tensor_scale);
                (x.dequantize(), x.scale_bytes(t.layout).unwrap())
            }
        };
        assert_same(&found, &t.dequantized);
        assert_eq!(scales, t.scales);
    }
}

/// Where torchao rounds by the same rule, our bytes are its bytes. (NVFP4 it multiplies by a rounded
/// reciprocal, with a floor under the scale.)
#[test]
fn mx_tensors_equal_torchaos() {
    let mut compared = 0;
    for t in foreign() {
        let Some(rule) = t.rule else { continue };
        let ours = MxTensor::quantize(&t.input, t.shape, rule);
        assert_eq!(ours.scale_bytes(t.layout).unwrap(), t.scales);
        assert_eq!(ours.codes, t.codes, "{:?}, {rule:?}", t.shape);
        compared += 1;
    }
    assert_eq!(compared, 6);
}

/// The atom's own definition: four groups of 32 rows side by side in 16 bytes.
#[test]
fn offsets_within_an_atom() {
    for (row, group, offset) in [
        (0, 0, 0),
        (0, 3, 3),
        (1, 0, 16),
        (31, 0, 496),
        (32, 0, 4),
        (127, 3, 511),
    ] {
        assert_eq!(atom_offset(row, group, 4), offset);
        // The second atom along the groups, then the first of the second row of atoms.
        assert_eq!(atom_offset(row, 4 + group, 8), 512 + offset);
        assert_eq!(atom_offset(128 + row, group, 8), 1024 + offset);
    }
}

proptest! {
    #[test]
    fn atoms_hold_every_scale_once(rows in 0usize..300, groups in 0usize..20) {
        let length = ScaleLayout::Atoms.bytes(rows, groups);
        prop_assert!(length.is_multiple_of(512));
        let mut taken = vec![false; length];
        for (row, group) in (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group))) {
            let offset = atom_offset(row, group, groups);
            prop_assert!(!std::mem::replace(&mut taken[offset], true));
        }
        let dense: Vec<u8> = (0..rows * groups).map(|index| index as u8 | 1).collect();
        let atoms = to_atoms(&dense, rows, groups).unwrap();
        // Padding is zero, and nothing else is.
        prop_assert_eq!(atoms.iter().map(|&byte| byte != 0).collect::<Vec<_>>(), taken);
        prop_assert_eq!(from_atoms(&atoms, rows, groups).unwrap(), dense);
    }

    /// A tile that starts at any row of the document: its atoms are made of the dense table's rows.
    #[test]
    fn tiles_start_at_any_row(rows in 1usize..400, start in any::<prop::sample::Index>(), groups in 1usize..6) {
        let x: Vec<f32> = (0..rows).map(|row| 2f32.powi((row / 32) as i32)).collect();
        let blocks = TokenBlocks::quantize(&x, 1, ExponentRule::Up);
        let table = blocks.token_table(groups);
        prop_assert_eq!(table.len(), rows * groups);
        let start = start.index(rows);
        let tile = (rows - start).min(128);
        let atoms = to_atoms(&table[start * groups..][..tile * groups], tile, groups).unwrap();
        for row in 0..128usize {
            for group in 0..groups {
                let token = start + row;
                let expected = if row < tile { blocks.exponents[token / 32].0 } else { 0 };
                prop_assert_eq!(atoms[atom_offset(row, group, groups)], expected);
            }
        }
    }

    #[test]
    fn packing_keeps_the_order(codes in prop::collection::vec(0u8..16, 0..20)) {
        let codes: Vec<E2M1> = codes.into_iter().map(E2M1).collect();
        let bytes: Vec<u8> = pack(&codes).collect();
        prop_assert_eq!(bytes.len(), packed_len(codes.len()));
        let unpacked: Vec<E2M1> = unpack(&bytes).collect();
        prop_assert_eq!(&unpacked[..codes.len()], &codes[..]);
        prop_assert!(unpacked[codes.len()..].iter().all(|&code| code == E2M1::ZERO));
    }
}

#[test]
fn the_lower_index_is_the_low_nibble() {
    let bytes: Vec<u8> = pack(&[E2M1(0x3), E2M1(0xA), E2M1(0x5)]).collect();
    assert_eq!(bytes, [0xA3, 0x05]);
}

#[test]
fn wrong_lengths_are_refused() {
    let shape = GroupShape::mxfp4(3, 40, Axis::Rows);
    let read = |codes: usize, scales: usize, layout| {
        MxTensor::from_bytes(shape, &vec![0; codes], &vec![0; scales], layout)
    };
    assert!(read(60, 6, ScaleLayout::Dense).is_ok() && read(60, 512, ScaleLayout::Atoms).is_ok());

    let error = read(120, 6, ScaleLayout::Dense).unwrap_err();
    let expected = LayoutError::Codes {
        lines: 3,
        line: 40,
        bits: 4,
        expected: 60,
        found: 120,
    };
    assert_eq!(error, expected);
    let message = error.to_string();
    assert!(
        message.contains("120 bytes of codes") && message.contains("take 60"),
        "{message}"
    );

    for (layout, found, expected) in [(ScaleLayout::Dense, 512, 6), (ScaleLayout::Atoms, 6, 512)] {
        let error = read(60, found, layout).unwrap_err();
        let wanted = LayoutError::Scales {
            rows: 3,
            groups: 2,
            layout,
            expected,
            found,
        };
        assert_eq!(error, wanted);
    }
    assert!(to_atoms(&[0; 5], 3, 2).is_err() && from_atoms(&[0; 6], 3, 2).is_err());

    let empty = GroupShape { group: 0, ..shape };
    let error = MxTensor::from_bytes(empty, &[], &[], ScaleLayout::Dense).unwrap_err();
    assert_eq!(error, LayoutError::EmptyGroup);

    // A shape whose size overflows is a wrong length like any other.
    let huge = GroupShape::mxfp8(usize::MAX, 3, Axis::Rows);
    let error = MxTensor::from_bytes(huge, &[0; 3], &[0], ScaleLayout::Dense).unwrap_err();
    assert!(matches!(error, LayoutError::Codes { found: 3, .. }));
}

#[test]
fn a_scale_with_a_sign_is_refused() {
    let shape = GroupShape::nvfp4(1, 32, Axis::Rows);
    let read = |scale| Nvfp4Tensor::from_bytes(shape, &[0; 16], &[0x38, scale], ScaleLayout::Dense);
    assert!(read(0x7F).is_ok());
    let error = read(0xB8).unwrap_err();
    assert_eq!(
        error,
        LayoutError::SignedScale {
            index: 1,
            byte: 0xB8
        }
    );
}

#[test]
fn scales_that_no_longer_fit_are_not_written() {
    let mut tensor: GroupedTensor<Ue8m0> = MxTensor::quantize(
        &[1.0; 64],
        GroupShape::per_row(2, 32, Element::E4M3),
        ExponentRule::Up,
    );
    tensor.scales.pop();
    for layout in [ScaleLayout::Dense, ScaleLayout::Atoms] {
        assert!(matches!(
            tensor.scale_bytes(layout),
            Err(LayoutError::Scales { found: 1, .. })
        ));
    }
}
