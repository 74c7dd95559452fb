//! This project's attention on a [`Problem`].

use flamia_kernels::cpu::{self, Gradients, Real};
use flamia_kernels::{AttentionError, Element, Mask, Options, Path, TensorView};

use crate::problem::{Outputs, Problem};

/// Forward and backward pass under `options`. An exponential for inference has no backward pass: the
/// gradients are empty then.
///
/// # Errors
/// Operands that do not fit one another, or options that do not go together.
pub fn attend(problem: &Problem, options: &Options) -> Result<Outputs, AttentionError> {
    attend_in(
        problem,
        [&problem.q, &problem.k, &problem.v, &problem.d_o].map(|x| x.as_slice()),
        options,
    )
}

/// Exact attention in float64.
///
/// # Errors
/// Operands that do not fit one another.
pub fn exact(problem: &Problem, mask: Mask) -> Result<Outputs, AttentionError> {
    let wide = [&problem.q, &problem.k, &problem.v, &problem.d_o]
        .map(|x| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    let options = Options::new(Path::Reference, mask);
    attend_in(problem, wide.each_ref().map(Vec::as_slice), &options)
}

fn attend_in<E: Element>(
    problem: &Problem,
    [q, k, v, d_o]: [&[E]; 4],
    options: &Options,
) -> Result<Outputs, AttentionError> {
    let Problem {
        heads,
        kv_heads,
        head_dim,
        ref documents,
        ..
    } = *problem;
    let view = |name, x, heads| TensorView::packed(name, x, documents.total(), heads, head_dim);
    let (q, d_o) = (view("q", q, heads)?, view("d_o", d_o, heads)?);
    let (k, v) = (view("k", k, kv_heads)?, view("v", v, kv_heads)?);
    let forward = cpu::forward(&q, &k, &v, documents, options, None)?;
    let gradients = if options.exponential.is_inference_only() {
        Gradients {
            dq: Vec::new(),
            dk: Vec::new(),
            dv: Vec::new(),
        }
    } else {
        let (o, lse) = (view("o", &forward.o, heads)?, &forward.lse);
        cpu::backward(&q, &k, &v, &o, lse, &d_o, documents, options, None)?
    };
    let wide = |x: &[E]| x.iter().map(|x| x.to_real::<f64>()).collect();
    Ok(Outputs {
        o: wide(&forward.o),
        lse: forward.lse.iter().map(|x| x.to_f64()).collect(),
        dq: wide(&gradients.dq),
        dk: wide(&gradients.dk),
        dv: wide(&gradients.dv),
    })
}
