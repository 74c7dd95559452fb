//! What a quantised tensor has to be, byte for byte, by the formats' own definition.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::f32::consts::LOG2_E;
use std::ops::Range;

use flamia_format::blocks::{BLOCK, TokenBlocks};
use flamia_format::{E4M3, ExponentRule, Ue8m0, hadamard_rows, pow2};
use flamia_kernels::cuda::layout::padded_start;
use flamia_kernels::cuda::quantise::{Quantisation, QuantisedLayout};
use flamia_sched::Documents;
use half::bf16;

/// The smallest exponent of the `hopper` profile.
const MIN_EXPONENT: i32 = -96;

/// A packed tensor on the host, as `[tokens, heads of the row, head_dim]`, of whose heads some are
/// the tensor's and the others somebody else's.
#[derive(Clone)]
pub struct Packed {
    pub data: Vec<bf16>,
    pub row_heads: usize,
    pub heads: Range<usize>,
    pub head_dim: usize,
}

impl Packed {
    /// A tensor that has the rows for itself.
    pub fn whole(data: Vec<bf16>, heads: usize, head_dim: usize) -> Self {
        Self {
            data,
            row_heads: heads,
            heads: 0..heads,
            head_dim,
        }
    }

    fn rows(&self, head: usize, rows: Range<usize>) -> Vec<f32> {
        let row = self.row_heads * self.head_dim;
        let first = (self.heads.start + head) * self.head_dim;
        rows.flat_map(|token| &self.data[token * row + first..][..self.head_dim])
            .map(|x| x.to_f32())
            .collect()
    }
}

/// One block of a document and head.
struct Block {
    codes: Vec<u8>,
    scale: f32,
    fold: f32,
}

impl Block {
    fn quantise(values: &[f32], dims: usize) -> Self {
        let blocks = TokenBlocks::quantize(values, dims, ExponentRule::Up);
        let exponent = blocks.exponents[0];
        let floored = exponent.exponent().unwrap_or(0).max(MIN_EXPONENT);
        let is_under_floor = exponent.exponent().is_some_and(|e| e < MIN_EXPONENT);
        let codes = if is_under_floor && values.iter().any(|x| *x != 0.0) {
            let recoded = |x: f32| E4M3::from_f32(x * pow2(-floored)).0;
            blocks.dequantize().into_iter().map(recoded).collect()
        } else {
            blocks.codes.iter().map(|code| code.0).collect()
        };
        let has_scale = exponent != Ue8m0::ZERO_BLOCK && !exponent.is_nan();
        let (scale, fold) = if has_scale {
            (pow2(floored), floored as f32)
        } else if exponent.is_nan() {
            (f32::from_bits(0x7fff_ffff), MIN_EXPONENT as f32)
        } else {
            (0.0, MIN_EXPONENT as f32)
        };
        Self { codes, scale, fold }
    }
}

/// A forward pass's results, for D and LSE in base 2.
pub struct ForwardOutput {
    pub o: Packed,
    /// `[heads, tokens]`.
    pub lse: Vec<f32>,
}

/// 16 sums over every sixteenth product, then pairs of sums.
fn row_sum(codes: &[u8], scale: f32, o: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    for (i, (code, o)) in codes.iter().zip(o).enumerate() {
        sums[i % 16] += E4M3(*code).to_f32() * scale * o;
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}

/// The scratch after a launch over scratch whose bytes were all `poison`.
pub fn expected(
    documents: &Documents,
    input: &Packed,
    output: Option<&ForwardOutput>,
    quantisation: &Quantisation,
    layout: &QuantisedLayout,
    poison: u8,
) -> Vec<u8> {
    let dims = input.head_dim;
    let padded = layout.padded();
    let at = layout.at(0);
    let mut scratch = vec![poison; layout.bytes()];
    let mut put = |part: u64, index: usize, value: f32| {
        scratch[part as usize + 4 * index..][..4].copy_from_slice(&value.to_ne_bytes());
    };
    let mut images = Vec::new();
    for head in 0..padded.heads() {
        for (number, rows) in documents.iter().enumerate() {
            let mut values = input.rows(head, rows.clone());
            if quantisation.hadamard {
                hadamard_rows(&mut values, dims).unwrap();
            }
            let forward = output.map(|output| {
                let lse = &output.lse[head * documents.total()..][rows.clone()];
                (output.o.rows(head, rows.clone()), lse)
            });
            for (index, values) in values.chunks(BLOCK * dims).enumerate() {
                let mut block = Block::quantise(values, dims);
                block.codes.resize(BLOCK * dims, 0);
                let first = padded_start(rows.start, number) + BLOCK * index;
                let table = head * padded.blocks() + first / BLOCK;
                put(at.scales, table, block.scale);
                put(at.folds, table, block.fold);
                for (token, codes) in block.codes.chunks(dims).enumerate() {
                    let slot = first + token;
                    if let (Some(d), Some(lse2), Some((o, lse))) = (at.row_sums, at.lse2, &forward)
                    {
                        let row = BLOCK * index + token;
                        let sum = o.chunks(dims).nth(row);
                        let sum = sum.map_or(0.0, |o| row_sum(codes, block.scale, o));
                        put(d, head * padded.slots() + slot, sum);
                        let base2 = lse.get(row).map_or(f32::INFINITY, |lse| lse * LOG2_E);
                        put(lse2, head * padded.slots() + slot, base2);
                    }
                    for (dim, code) in codes.iter().enumerate() {
                        images.push((head, slot, dim, *code));
                    }
                }
            }
        }
    }
    for (head, slot, dim, code) in images {
        if let Some(part) = at.row_image {
            scratch[part as usize + padded.row_byte(head, slot, dim)] = code;
        }
        if let Some(part) = at.transposed_image {
            scratch[part as usize + padded.transposed_byte(head, slot, dim)] = code;
        }
    }
    scratch
}

/// Panics with the first place where two scratches differ, in the terms of their layout. NaNs of D are
/// equal.
pub fn compare(found: &[u8], expected: &[u8], layout: &QuantisedLayout, case: &str) {
    let at = layout.at(0);
    let padded = layout.padded();
    let d = at.row_sums.map_or(0..0, |part| {
        part as usize..part as usize + padded.slot_table_bytes()
    });
    let float = |bytes: &[u8], i: usize| {
        let bytes = bytes[i / 4 * 4..][..4].try_into();
        f32::from_ne_bytes(bytes.expect("four bytes"))
    };
    let differs = |i: usize| {
        let both_nan = || float(found, i).is_nan() && float(expected, i).is_nan();
        found[i] != expected[i] && !(d.contains(&i) && both_nan())
    };
    let differences: Vec<_> = (0..expected.len()).filter(|&i| differs(i)).collect();
    let Some(&first) = differences.first() else {
        return;
    };
    let inside = |part: u64, len: usize| (part as usize..part as usize + len).contains(&first);
    let image = |name: &str, part: u64, byte: &dyn Fn(usize, usize, usize) -> usize| {
        for head in 0..padded.heads() {
            for slot in 0..padded.slots() {
                for dim in 0..padded.head_dim().get() {
                    if part as usize + byte(head, slot, dim) == first {
                        return format!("{name} of head {head}, slot {slot}, dim {dim}");
                    }
                }
            }
        }
        unreachable!("an image has a byte for every element")
    };
    let of_slot = |name: &str, part: u64| {
        let index = (first - part as usize) / 4;
        let (head, slot) = (index / padded.slots(), index % padded.slots());
        format!("{name} of head {head}, slot {slot}")
    };
    let place = match (at.row_image, at.transposed_image, at.row_sums) {
        (Some(part), ..) if inside(part, padded.image_bytes()) => {
            image("row image", part, &|h, s, d| padded.row_byte(h, s, d))
        }
        (_, Some(part), _) if inside(part, padded.image_bytes()) => {
            image("transposed image", part, &|h, s, d| {
                padded.transposed_byte(h, s, d)
            })
        }
        (.., Some(part)) if inside(part, padded.slot_table_bytes()) => of_slot("D", part),
        _ if at
            .lse2
            .is_some_and(|part| inside(part, padded.slot_table_bytes())) =>
        {
            of_slot("LSE in base 2", at.lse2.expect("it was just looked into"))
        }
        _ if inside(at.scales, padded.block_table_bytes()) => {
            format!("scale {}", (first - at.scales as usize) / 4)
        }
        _ if inside(at.folds, padded.block_table_bytes()) => {
            format!("fold {}", (first - at.folds as usize) / 4)
        }
        _ => "the gap between two parts".to_owned(),
    };
    panic!(
        "{case}: {} bytes differ; the first is of {place}: found {:#04x} (float {:e}), expected {:#04x} \
         (float {:e})",
        differences.len(),
        found[first],
        float(found, first),
        expected[first],
        float(expected, first)
    );
}
