//! What attention is timed on: the packed rows of the paper's section 4.1, and batches.

use flamia_kernels::cuda::call::CallShape;
use flamia_sched::Documents;
use flamia_sched::workloads::{WORKLOADS, Workload};

use super::row::{Masking, Pass};

/// A packed row and the heads that attend to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Unique among [`shapes`].
    pub name: &'static str,
    /// Rows of each document.
    pub lengths: &'static [usize],
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
}

/// Batches of equal lengths, as in the paper's appendix J: of 16k and of 32k rows, with shared key
/// and value heads, and with small heads. Its text names 1x32768 alone; `4x4096` and three more of the
/// packed rows are batches as well.
const BATCHES: [Shape; 6] = [
    Shape::batch("8x2048", &[2048; 8]),
    Shape::batch("2x8192", &[8192; 2]),
    Shape::batch("1x16384", &[16384]),
    Shape {
        kv_heads: 4,
        ..Shape::batch("1x16384-gqa4", &[16384])
    },
    Shape {
        head_dim: 64,
        ..Shape::batch("1x16384-d64", &[16384])
    },
    Shape::batch("1x32768", &[32768]),
];

/// The packed rows in the paper's order, then the batches.
pub fn shapes() -> impl Iterator<Item = Shape> {
    WORKLOADS.iter().map(Shape::packed).chain(BATCHES)
}

impl Shape {
    pub(super) const fn batch(name: &'static str, lengths: &'static [usize]) -> Self {
        Self {
            name,
            lengths,
            heads: 16,
            kv_heads: 16,
            head_dim: 128,
        }
    }

    const fn packed(workload: &Workload) -> Self {
        Self {
            heads: workload.heads,
            kv_heads: workload.kv_heads,
            ..Self::batch(workload.name, workload.lengths)
        }
    }

    /// The shape of this name.
    pub fn named(name: &str) -> Option<Self> {
        shapes().find(|shape| shape.name == name)
    }

    /// Whether it is one of the paper's packed rows, which targets are set for.
    pub fn is_packed_row(name: &str) -> bool {
        Workload::named(name).is_some()
    }

    /// The name that is most like `found`.
    pub fn nearest(found: &str) -> &'static str {
        let likeness = |name: &str| strsim::normalized_damerau_levenshtein(name, found);
        let names = shapes().map(|shape| shape.name);
        names
            .max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
            .unwrap_or_default()
    }

    /// Its packed row.
    ///
    /// # Panics
    /// If the lengths are more than a packed row can hold, which those of [`shapes`] are not.
    pub fn documents(&self) -> Documents {
        Documents::from_lengths(self.lengths).expect("a workload fits a packed row")
    }

    /// The shape of its calls.
    ///
    /// # Panics
    /// As [`Shape::documents`].
    pub fn of_call(&self) -> CallShape {
        CallShape::of(&self.documents(), self.heads, self.kv_heads, self.head_dim)
    }

    /// Floating-point operations of a pass, as all who publish times of attention count them: two
    /// products of every query with every key forward, half of that if causal whatever the diagonal
    /// adds, and five products instead of two backward.
    pub fn flops(&self, mask: Masking, pass: Pass) -> f64 {
        let pairs: f64 = self.lengths.iter().map(|&len| (len as f64).powi(2)).sum();
        let seen = match mask {
            Masking::Causal => 0.5,
            Masking::Full => 1.0,
        };
        let forward = 4.0 * (self.heads * self.head_dim) as f64 * pairs * seen;
        forward
            * match pass {
                Pass::Fwd => 1.0,
                Pass::Bwd => 2.5,
                Pass::Train => 3.5,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_are_those_of_the_published_rates() {
        let shape = Shape::named("4x4096").unwrap();
        // 0.427 ms are 643 TFLOP/s causal, 0.781 ms are 704 full, 1.248 ms are 551 backward.
        let rates = [
            (Masking::Causal, Pass::Fwd, 0.427, 643.0),
            (Masking::Full, Pass::Fwd, 0.781, 704.0),
            (Masking::Causal, Pass::Bwd, 1.248, 551.0),
        ];
        for (mask, pass, ms, tflops) in rates {
            let found = shape.flops(mask, pass) / ms / 1e9;
            assert!((found - tflops).abs() < 1.0, "{found} for {tflops}");
        }
        let train = shape.flops(Masking::Causal, Pass::Train);
        let parts = [Pass::Fwd, Pass::Bwd].map(|pass| shape.flops(Masking::Causal, pass));
        assert_eq!(train, parts[0] + parts[1]);
        let gqa = Shape::named("logu11-16k-gqa4").unwrap();
        let mha = Shape::named("logu11-16k").unwrap();
        let forward = |shape: Shape| shape.flops(Masking::Full, Pass::Fwd);
        assert_eq!(forward(gqa), forward(mha));
    }

    #[test]
    fn names_say_what_batches_are() {
        assert_eq!(shapes().count(), WORKLOADS.len() + BATCHES.len());
        let packed = shapes().filter(|shape| Shape::is_packed_row(shape.name));
        assert_eq!(packed.count(), 9);
        for shape in BATCHES {
            let mut parts = shape.name.split('-');
            let (count, length) = parts.next().unwrap().split_once('x').unwrap();
            assert_eq!(shape.lengths.len().to_string(), count);
            assert!(shape.lengths.iter().all(|len| len.to_string() == length));
            let rest: Vec<_> = parts.collect();
            assert_eq!(rest.contains(&"gqa4"), shape.kv_heads == 4);
            assert_eq!(rest.contains(&"d64"), shape.head_dim == 64);
            assert_eq!(Shape::named(shape.name), Some(shape));
        }
    }

    #[test]
    fn a_near_miss_is_understood() {
        assert_eq!(Shape::named("4x4069"), None);
        assert_eq!(Shape::nearest("4x4069"), "4x4096");
        assert_eq!(Shape::nearest("logu11-gqa4"), "logu11-16k-gqa4");
    }
}
