//! Tests a backward against central finite differences in double precision.

use tch::{Kind, TchError, Tensor};

use crate::error::FunctionError;

/// Why [`gradcheck`] did not pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GradcheckError {
    /// An input that requires grad is not in double precision, where differences mean something.
    #[error("input {input} requires grad and is {kind:?}; finite differences need Kind::Double")]
    NotDouble {
        /// Which input.
        input: usize,
        /// Its kind.
        kind: Kind,
    },

    /// No input requires grad, or no output depends on one: the check would be empty.
    #[error(
        "no output requires grad; set requires_grad on an input, and check that the function is differentiable"
    )]
    NothingToCheck,

    /// The function returned different numbers of values from run to run.
    #[error("output {output} changed its shape between two runs on inputs of the same shapes")]
    OutputsChanged {
        /// Which output.
        output: usize,
    },

    /// The function failed.
    #[error(transparent)]
    Function(#[from] FunctionError),

    /// torch failed, which includes a failing backward.
    #[error(transparent)]
    Torch(#[from] TchError),

    /// Backward and finite differences disagree.
    #[error(
        "d output {output}[{output_element}] / d input {input}[{input_element}] is {analytic} by backward and {numeric} by finite differences"
    )]
    Mismatch {
        /// Which output.
        output: usize,
        /// Index into the output, flattened row by row.
        output_element: usize,
        /// Which input.
        input: usize,
        /// Index into the input, flattened row by row.
        input_element: usize,
        /// What backward says.
        analytic: f64,
        /// What the differences say.
        numeric: f64,
    },
}

/// Compares the whole Jacobian of `f` at `inputs`, as its backward gives it, with
/// `(f(x + eps) - f(x - eps)) / (2 eps)` for each element of each input that requires grad.
///
/// Passes if `|analytic - numeric| <= atol + rtol * |numeric|` everywhere. For smooth functions of
/// order one, `eps = 1e-6`, `atol = 1e-8`, `rtol = 1e-6` are reasonable. The cost is one backward
/// per output element and two forwards per input element. Outputs that do not require grad are
/// not looked at.
///
/// # Errors
/// The first mismatch (not-a-number never matches), an empty check, or a failure of `f`.
pub fn gradcheck<F>(
    f: F,
    inputs: &[Tensor],
    eps: f64,
    atol: f64,
    rtol: f64,
) -> Result<(), GradcheckError>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>, FunctionError>,
{
    let leaves: Vec<Tensor> = inputs
        .iter()
        .map(|input| {
            input
                .detach()
                .copy()
                .set_requires_grad(input.requires_grad())
        })
        .collect();
    let checked: Vec<usize> = (0..leaves.len())
        .filter(|&i| leaves[i].requires_grad())
        .collect();
    for &input in &checked {
        let kind = leaves[input].kind();
        if kind != Kind::Double {
            return Err(GradcheckError::NotDouble { input, kind });
        }
    }
    let outputs = f(&leaves)?;
    if !outputs.iter().any(Tensor::requires_grad) {
        return Err(GradcheckError::NothingToCheck);
    }

    let wrt: Vec<&Tensor> = checked.iter().map(|&input| &leaves[input]).collect();
    let numeric: Vec<Vec<Differences>> = checked
        .iter()
        .map(|&input| differences(&f, &leaves, input, &outputs, eps))
        .collect::<Result<_, _>>()?;

    for (output, value) in outputs
        .iter()
        .enumerate()
        .filter(|(_, y)| y.requires_grad())
    {
        let elements = value.reshape([-1]);
        for output_element in 0..value.numel() {
            let element = elements.get(output_element as i64);
            let grads = Tensor::f_run_backward(&[element], &wrt, true, false)?;
            for (k, &input) in checked.iter().enumerate() {
                let analytic = if grads[k].defined() {
                    values(&grads[k])?
                } else {
                    vec![0.0; leaves[input].numel()]
                };
                for (input_element, &analytic) in analytic.iter().enumerate() {
                    let numeric = numeric[k][input_element][output][output_element];
                    let close = (analytic - numeric).abs() <= atol + rtol * numeric.abs();
                    if !close {
                        return Err(GradcheckError::Mismatch {
                            output,
                            output_element,
                            input,
                            input_element,
                            analytic,
                            numeric,
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

/// The change of every output element with one input element: `[output][output_element]`.
type Differences = Vec<Vec<f64>>;

/// One [`Differences`] for each element of `inputs[which]`.
fn differences<F>(
    f: &F,
    inputs: &[Tensor],
    which: usize,
    outputs: &[Tensor],
    eps: f64,
) -> Result<Vec<Differences>, GradcheckError>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>, FunctionError>,
{
    let _guard = tch::no_grad_guard();
    let base = values(&inputs[which])?;
    let evaluate = |element: usize, step: f64| -> Result<Vec<Vec<f64>>, GradcheckError> {
        let mut moved = base.clone();
        moved[element] += step;
        let mut arguments: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
        arguments[which] = Tensor::from_slice(&moved).reshape(inputs[which].size());
        let results = f(&arguments)?;
        Ok(results.iter().map(values).collect::<Result<_, _>>()?)
    };

    (0..base.len())
        .map(|element| {
            let up = evaluate(element, eps)?;
            let down = evaluate(element, -eps)?;
            outputs
                .iter()
                .enumerate()
                .map(|(output, expected)| {
                    let (Some(up), Some(down)) = (up.get(output), down.get(output)) else {
                        return Err(GradcheckError::OutputsChanged { output });
                    };
                    if up.len() != expected.numel() || down.len() != expected.numel() {
                        return Err(GradcheckError::OutputsChanged { output });
                    }
                    Ok(up
                        .iter()
                        .zip(down)
                        .map(|(up, down)| (up - down) / (2.0 * eps))
                        .collect())
                })
                .collect()
        })
        .collect()
}

/// The elements row by row, in double precision.
fn values(tensor: &Tensor) -> Result<Vec<f64>, TchError> {
    Vec::try_from(&tensor.detach().f_to_kind(Kind::Double)?.f_reshape([-1])?)
}
