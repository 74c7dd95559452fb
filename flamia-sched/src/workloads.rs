//! The packed rows that attention is compared on: the nine workloads of the paper's section 4.1.

use crate::Documents;

/// A packed row and the heads that attend to it, at head dimension 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Unique among [`WORKLOADS`].
    pub name: &'static str,
    /// Rows of each document, in packed order. The long one of a skewed workload comes first.
    pub lengths: &'static [usize],
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
}

/// The workloads in the paper's order.
pub const WORKLOADS: [Workload; 9] = [
    Workload::new("4x4096", &[4096; 4]),
    Workload::new("16x4096", &[4096; 16]),
    Workload::new("16x1024", &[1024; 16]),
    Workload::new("64x1024", &[1024; 64]),
    Workload::new("8192+32x256", &skewed::<33>()),
    Workload::new("8192+224x256", &skewed::<225>()),
    Workload::new("logu11-16k", &LOG_UNIFORM_16K),
    Workload {
        kv_heads: 4,
        ..Workload::new("logu11-16k-gqa4", &LOG_UNIFORM_16K)
    },
    Workload::new("logu29-64k", &LOG_UNIFORM_64K),
];

/// 11 lengths drawn log-uniformly between 128 and 8192, scaled to 16k rows in all. The paper does
/// not print its own; these are the ones other systems' attention was measured on for comparison.
const LOG_UNIFORM_16K: [usize; 11] = [287, 567, 591, 466, 2253, 352, 1516, 4243, 2486, 1760, 1863];

/// 29 such lengths for 64k rows.
const LOG_UNIFORM_64K: [usize; 29] = [
    6519, 215, 2735, 1357, 6403, 1278, 237, 436, 2560, 981, 202, 2458, 1889, 4133, 3024, 659, 7197,
    326, 3356, 230, 3167, 2713, 3908, 2587, 836, 251, 5407, 159, 313,
];

impl Workload {
    const fn new(name: &'static str, lengths: &'static [usize]) -> Self {
        Self {
            name,
            lengths,
            heads: 16,
            kv_heads: 16,
        }
    }

    /// The workload of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        WORKLOADS.iter().find(|workload| workload.name == name)
    }

    /// Its packed row.
    ///
    /// # Panics
    /// If the lengths are more than a packed row can hold, which those of [`WORKLOADS`] are not.
    pub fn documents(&self) -> Documents {
        Documents::from_lengths(self.lengths).expect("a workload fits a packed row")
    }
}

/// One document of 8192 rows, then short ones.
const fn skewed<const N: usize>() -> [usize; N] {
    let mut lengths = [256; N];
    lengths[0] = 8192;
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the paper's section 4.1: documents, rows, longest.
    #[test]
    fn the_workloads_have_the_stated_shapes() {
        let shapes = [
            ("4x4096", 4, 16384, 4096),
            ("16x4096", 16, 65536, 4096),
            ("16x1024", 16, 16384, 1024),
            ("64x1024", 64, 65536, 1024),
            ("8192+32x256", 33, 16384, 8192),
            ("8192+224x256", 225, 65536, 8192),
            ("logu11-16k", 11, 16384, 4243),
            ("logu11-16k-gqa4", 11, 16384, 4243),
            ("logu29-64k", 29, 65536, 7197),
        ];
        assert_eq!(WORKLOADS.map(|workload| workload.name), shapes.map(|s| s.0));
        for (name, documents, rows, longest) in shapes {
            let workload = Workload::named(name).unwrap();
            let row = workload.documents();
            assert_eq!(
                (row.len(), row.total(), row.longest()),
                (documents, rows, longest)
            );
            assert!(
                workload
                    .lengths
                    .iter()
                    .all(|len| (128..=8192).contains(len))
            );
            let kv_heads = if name.ends_with("gqa4") { 4 } else { 16 };
            assert_eq!((workload.heads, workload.kv_heads), (16, kv_heads));
        }
        assert_eq!(Workload::named("4x4097"), None);
    }
}
