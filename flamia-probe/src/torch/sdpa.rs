//! torch's own attention as schemes of `probe leakage`.

use flamia_kernels::Mask;
use flamia_train::attention::{Attend, Attention, AttentionFailure};
use tch::{Kind, Tensor as Torch};

use crate::error::ProbeError;
use crate::leakage::Scheme;
use crate::problem::{Outputs, Problem, Tensor};

/// `sdpa-f32` and `sdpa-bf16`: scaled_dot_product_attention and torch's autograd, one document at a
/// time, causal. It reports no log-sum-exp.
pub fn schemes() -> Vec<Scheme> {
    [("sdpa-f32", Kind::Float), ("sdpa-bf16", Kind::BFloat16)]
        .into_iter()
        .map(|(name, kind)| {
            Scheme::new(name, move |problem| {
                attend(problem, kind).map_err(|error| ProbeError::Foreign(error.into()))
            })
        })
        .collect()
}

fn attend(problem: &Problem, kind: Kind) -> Result<Outputs, AttentionFailure> {
    let leaf = |tensor| {
        let shape = [problem.rows(), problem.heads_of(tensor), problem.head_dim];
        Torch::f_from_slice(problem.tensor(tensor))?
            .f_view(shape.map(|n| n as i64).as_slice())?
            .f_to_kind(kind)?
            .f_set_requires_grad(tensor != Tensor::DO)
    };
    let (q, k, v) = (leaf(Tensor::Q)?, leaf(Tensor::K)?, leaf(Tensor::V)?);
    let o = Attention::Sdpa { mask: Mask::Causal }.attend(0, &q, &k, &v, &problem.documents)?;
    let gradients = Torch::f_run_backward(
        &[(&o * leaf(Tensor::DO)?).f_sum(Kind::Float)?],
        &[&q, &k, &v],
        false,
        false,
    )?;
    let read = |x: &Torch| -> Result<Vec<f64>, AttentionFailure> {
        let x = x.f_to_kind(Kind::Double)?.f_contiguous()?.f_view(-1)?;
        Ok(Vec::<f64>::try_from(&x)?)
    };
    Ok(Outputs {
        o: read(&o.f_detach()?)?,
        lse: Vec::new(),
        dq: read(&gradients[0])?,
        dk: read(&gradients[1])?,
        dv: read(&gradients[2])?,
    })
}
