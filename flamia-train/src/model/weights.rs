//! The weights as matrix products read them: as they are, or as BF16 copies made once an update.

use std::cell::RefCell;
use std::collections::HashMap;

use flamia_autograd::{FunctionError, apply_fn};
use tch::{Kind, TchError, Tensor, no_grad};

use super::params::Params;
use super::{ModelError, linear};

/// What matrix products are computed in. Weights, moments and gradients are FP32 in both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
    /// FP32 throughout.
    #[default]
    Fp32,
    /// Matrix products, attention and SwiGLU in BF16. RMSNorm, rotary embeddings, cross-entropy and
    /// the residual stream stay FP32: the stream is a sum of many small terms, each of which would
    /// lose all but 8 bits to it.
    Bf16,
}

/// BF16 copies of FP32 weights, by the name of the first weight in each.
#[derive(Debug, Default)]
pub struct Copies(RefCell<HashMap<String, Stacked>>);

/// Weights stacked along their outputs, so that one product multiplies with all of them.
#[derive(Debug)]
struct Stacked {
    /// torch's count of changes of each weight when it was copied: an outdated copy is never used.
    versions: Vec<i64>,
    tensor: Tensor,
}

impl Copies {
    /// `x` times each weight of `names`, which have one input width: `[T, out]` each, in BF16. Gradients reach
    /// the weights in FP32.
    pub(super) fn multiply(
        &self,
        params: &Params,
        x: &Tensor,
        names: &[String],
    ) -> Result<Vec<Tensor>, ModelError> {
        let stacked = self.stacked(params, names)?;
        let product = linear(x, &stacked)?;
        if names.len() == 1 {
            return Ok(vec![product]);
        }
        let widths: Vec<i64> = names
            .iter()
            .map(|name| params.get(name).size()[0])
            .collect();
        Ok(product.f_split_with_sizes(widths, -1)?)
    }

    /// The copy of `names`, up to date, as a function of the weights.
    pub(super) fn stacked(&self, params: &Params, names: &[String]) -> Result<Tensor, ModelError> {
        let weights: Vec<&Tensor> = names.iter().map(|name| params.get(name)).collect();
        let versions = weights.iter().map(|weight| weight.f_internal_version());
        let versions = versions.collect::<Result<Vec<_>, TchError>>()?;
        let mut copies = self.0.borrow_mut();
        let copy = match copies.remove(&names[0]) {
            Some(copy) if copy.versions == versions => copy,
            outdated => Stacked::of(&weights, versions, outdated)?,
        };
        let alias = copy.tensor.f_detach()?;
        copies.insert(names[0].clone(), copy);

        let rows: Vec<i64> = weights.iter().map(|weight| weight.size()[0]).collect();
        let inputs: Vec<Option<&Tensor>> = weights.iter().copied().map(Some).collect();
        let outputs = apply_fn(
            "weights in BF16",
            &inputs,
            |_, _| Ok(vec![alias]),
            move |_, grads| split(grads[0].as_ref(), &rows),
        );
        Ok(outputs?.swap_remove(0))
    }
}

/// The gradient of stacked weights, weight by weight; torch widens it to the weights' FP32.
fn split(grad: Option<&Tensor>, rows: &[i64]) -> Result<Vec<Option<Tensor>>, FunctionError> {
    let Some(grad) = grad else {
        return Ok(rows.iter().map(|_| None).collect());
    };
    let parts = grad.f_split_with_sizes(rows, 0)?;
    Ok(parts.into_iter().map(Some).collect())
}

impl Stacked {
    /// Copies `weights` to where the `outdated` copy was, if there was one.
    fn of(
        weights: &[&Tensor],
        versions: Vec<i64>,
        outdated: Option<Self>,
    ) -> Result<Self, TchError> {
        let rows = weights.iter().map(|weight| weight.size()[0]).sum();
        let place = (Kind::BFloat16, weights[0].device());
        let tensor = match outdated {
            Some(copy) => copy.tensor,
            None => Tensor::f_empty([rows, weights[0].size()[1]], place)?,
        };
        no_grad(|| {
            let mut start = 0;
            weights.iter().try_for_each(|weight| {
                let rows = weight.size()[0];
                tensor.f_narrow(0, start, rows)?.f_copy_(weight)?;
                start += rows;
                Ok::<_, TchError>(())
            })
        })?;
        Ok(Self { versions, tensor })
    }
}
