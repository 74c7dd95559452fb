//! Counting what a scheme rounds to zero.

use std::ops::AddAssign;

/// Entries that were not zero, and what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Entries that were not zero before they were rounded.
    pub nonzero: u64,
    /// Those of them that were zero afterwards.
    pub flushed: u64,
    /// Scale groups with such an entry.
    pub groups: u64,
    /// Those of them in which nothing was left.
    pub lost: u64,
}

impl Count {
    /// The share of nonzero entries that were rounded to zero; 0 if there were none.
    pub fn fraction(&self) -> f64 {
        share(self.flushed, self.nonzero)
    }

    /// The share of groups that were rounded to zero altogether.
    pub fn lost_groups(&self) -> f64 {
        share(self.lost, self.groups)
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.nonzero += other.nonzero;
        self.flushed += other.flushed;
        self.groups += other.groups;
        self.lost += other.lost;
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// Rounds a row-major matrix of `cols` columns in groups of `rows_per_group` by `cols_per_group`
/// entries, the last of a row or column possibly smaller, each by one call of `round`.
pub fn count(
    matrix: &[f32],
    cols: usize,
    [rows_per_group, cols_per_group]: [usize; 2],
    mut round: impl FnMut(&mut [f32]),
) -> Count {
    let mut total = Count::default();
    let mut group = Vec::new();
    for rows in matrix.chunks(rows_per_group.saturating_mul(cols)) {
        for start in (0..cols).step_by(cols_per_group) {
            let columns = start..cols.min(start.saturating_add(cols_per_group));
            group.clear();
            for row in rows.chunks_exact(cols) {
                group.extend_from_slice(&row[columns.clone()]);
            }
            let nonzero = nonzeros(&group);
            if nonzero > 0 {
                round(&mut group);
                let left = nonzeros(&group);
                total += Count {
                    nonzero,
                    flushed: nonzero - left,
                    groups: 1,
                    lost: u64::from(left == 0),
                };
            }
        }
    }
    total
}

fn nonzeros(x: &[f32]) -> u64 {
    x.iter().filter(|x| **x != 0.0).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_cut_as_asked() {
        // Rounds what is under half of the group's largest entry to zero.
        let half = |x: &mut [f32]| {
            let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            x.iter_mut()
                .filter(|x| x.abs() < amax / 2.0)
                .for_each(|x| *x = 0.0);
        };
        #[rustfmt::skip]
        let matrix = [
            1.0, 0.4, 9.0,
            0.3, 0.0, 8.0,
            0.0, 0.0, 0.1,
        ];
        let fraction = |shape| count(&matrix, 3, shape, half).fraction();
        assert_eq!(fraction([3, 3]), 4.0 / 6.0);
        assert_eq!(fraction([1, 3]), 3.0 / 6.0);
        assert_eq!(fraction([1, 1]), 0.0);
        assert_eq!(fraction([2, 2]), 2.0 / 6.0);
        assert_eq!(fraction([usize::MAX, 1]), 2.0 / 6.0);
        assert_eq!(count(&matrix, 3, [2, 2], half).groups, 3);
    }

    #[test]
    fn groups_with_nothing_left_are_lost() {
        let zero = |x: &mut [f32]| x.iter_mut().filter(|x| **x < 1.0).for_each(|x| *x = 0.0);
        let counted = count(&[0.5, 0.25, 2.0, 0.5, 0.0, 0.0], 6, [1, 2], zero);
        assert_eq!(
            counted,
            Count {
                nonzero: 4,
                flushed: 3,
                groups: 2,
                lost: 1
            }
        );
        assert_eq!(counted.lost_groups(), 0.5);
        assert_eq!(Count::default().fraction(), 0.0);
    }
}
