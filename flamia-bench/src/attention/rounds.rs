//! Fair turns: everybody once a round, in the other order every second round.

/// The median of `rounds` times of each of `count` contenders, which `time` takes. Whatever drifts,
/// such as the clock of a warming GPU, drifts for all of them.
///
/// # Errors
/// The first of `time`.
pub fn medians<E>(
    count: usize,
    rounds: u32,
    mut time: impl FnMut(usize) -> Result<f64, E>,
) -> Result<Vec<f64>, E> {
    let mut times = vec![Vec::new(); count];
    for round in 0..rounds {
        for turn in 0..count {
            let contender = match round % 2 {
                0 => turn,
                _ => count - 1 - turn,
            };
            times[contender].push(time(contender)?);
        }
    }
    Ok(times.iter_mut().map(|times| median(times)).collect())
}

/// The middle value, or the mean of the two in the middle; NaN of none.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_alternate() {
        let mut turns = Vec::new();
        let result = medians(3, 3, |contender| {
            turns.push(contender);
            Ok::<_, ()>(contender as f64)
        });
        assert_eq!(turns, [0, 1, 2, 2, 1, 0, 0, 1, 2]);
        assert_eq!(result.unwrap(), [0.0, 1.0, 2.0]);
    }

    #[test]
    fn a_disturbed_round_does_not_show() {
        let mut calls = 0;
        let result = medians(1, 5, |_| {
            calls += 1;
            Ok::<_, ()>([3.0, 100.0, 1.0, 2.0, 4.0][calls - 1])
        });
        assert_eq!(result.unwrap(), [3.0]);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 100.0]), 3.0);
        assert!(median(&mut []).is_nan());
    }

    #[test]
    fn the_first_error_ends_it() {
        let result = medians(2, 9, |contender| match contender {
            0 => Ok(1.0),
            _ => Err("no"),
        });
        assert_eq!(result, Err("no"));
    }
}
