//! How far a tensor is from another.

/// The cosine of the angle between two tensors; NaN if either is zero, empty, or holds NaN.
pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The Frobenius norm of the difference as a share of that of `expected`; NaN if `found` is empty.
pub fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    if found.is_empty() {
        return f64::NAN;
    }
    let difference: f64 = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b) * (a - b))
        .sum();
    (difference / dot(expected, expected)).sqrt()
}

/// The largest magnitude; NaN if there is one.
pub fn largest(x: impl IntoIterator<Item = f64>) -> f64 {
    x.into_iter().fold(0.0, |largest: f64, x| {
        if x.abs() > largest || x.is_nan() {
            x.abs()
        } else {
            largest
        }
    })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_vectors() {
        assert_eq!(cosine(&[3.0, 0.0], &[0.5, 0.0]), 1.0);
        assert_eq!(cosine(&[1.0, 1.0], &[1.0, -1.0]), 0.0);
        assert_eq!(relative_error(&[3.0, 5.0], &[3.0, 4.0]), 0.2);
        assert!(cosine(&[f64::NAN], &[1.0]).is_nan());
        assert!(cosine(&[], &[1.0]).is_nan() && relative_error(&[], &[1.0]).is_nan());
        assert_eq!(largest([1.0, -3.0, 2.0]), 3.0);
        assert!(largest([f64::NAN, 1.0]).is_nan());
    }
}
