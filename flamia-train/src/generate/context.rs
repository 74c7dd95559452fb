//! What a model has read of one document: keys and values of every layer.

use std::cell::RefCell;
use std::num::NonZero;

use flamia_sched::{Documents, DocumentsError, Mask};
use tch::{Device, TchError, Tensor};

use crate::attention::{Attend, AttentionFailure, sdpa};
use crate::device::send;
use crate::model::{Model, ModelError};

/// Why a document could not be read on.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// The forward pass.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Bringing ids to the device, or logits back.
    #[error("torch refused the model's input or output")]
    Torch(#[from] TchError),
    /// A prompt of more tokens than a row can have.
    #[error(transparent)]
    Documents(#[from] DocumentsError),
}

/// One document that is read piece by piece.
pub struct Context<'a> {
    model: &'a Model,
    device: Device,
    /// Tokens read.
    length: usize,
    attention: CachedAttention,
}

impl<'a> Context<'a> {
    /// An empty document, whose queries see the keys of `mask`.
    pub fn new(model: &'a Model, device: Device, mask: Mask) -> Self {
        Self {
            model,
            device,
            length: 0,
            attention: CachedAttention {
                mask,
                layers: RefCell::new((0..model.shape.layers).map(|_| None).collect()),
            },
        }
    }

    /// Reads `ids`, at least one of them, and gives the logits `[V]` of what follows the last. The first
    /// ids are read at once, later ones one after another.
    ///
    /// # Errors
    /// [`ContextError`].
    pub fn read(&mut self, ids: &[u32]) -> Result<Vec<f32>, ContextError> {
        let (at_once, one_by_one) = match self.length {
            0 => (ids, &[][..]),
            _ => ids.split_at(1),
        };
        let mut logits = self.forward(at_once)?;
        for id in one_by_one {
            logits = self.forward(std::slice::from_ref(id))?;
        }
        Ok(Vec::try_from(&logits.f_to_device(Device::Cpu)?)?)
    }

    fn forward(&mut self, ids: &[u32]) -> Result<Tensor, ContextError> {
        let end = self.length + ids.len();
        let tensor = |values: &[i64]| send(&Tensor::f_from_slice(values)?, self.device);
        let tokens: Vec<i64> = ids.iter().map(|&id| id.into()).collect();
        let positions: Vec<i64> = (self.length as i64..end as i64).collect();
        let documents = Documents::single(ids.len())?;
        let logits = self.model.last_logits(
            &tensor(&tokens)?,
            &tensor(&positions)?,
            &documents,
            &self.attention,
        )?;
        self.length = end;
        Ok(logits)
    }
}

/// Exact attention over all that was read: a first call of any length, then one token a call.
struct CachedAttention {
    mask: Mask,
    /// Keys and values of each layer, `[S, K, E]`.
    layers: RefCell<Vec<Option<[Tensor; 2]>>>,
}

impl Attend for CachedAttention {
    fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
    ) -> Result<Tensor, AttentionFailure> {
        let cached = &mut self.layers.borrow_mut()[layer];
        let Some([past_k, past_v]) = cached else {
            *cached = Some([k.shallow_clone(), v.shallow_clone()]);
            return Ok(sdpa(q, k, v, documents, self.mask)?);
        };
        *past_k = Tensor::f_cat(&[&*past_k, k], 0)?;
        *past_v = Tensor::f_cat(&[&*past_v, v], 0)?;
        if let Mask::Window(keys) = self.mask {
            // What slid out of the window is not seen again.
            *past_k = last(past_k, keys)?;
            *past_v = last(past_v, keys)?;
        }
        Ok(one_query(q, past_k, past_v)?)
    }
}

/// The last `rows` rows.
fn last(x: &Tensor, rows: NonZero<usize>) -> Result<Tensor, TchError> {
    let all = x.size()[0];
    let kept = i64::try_from(rows.get()).map_or(all, |rows| rows.min(all));
    x.f_narrow(0, all - kept, kept)
}

/// Attention of one query `[1, H, E]` to all keys `[S, K, E]`. The query heads that share a key head are so
/// many queries of it: keys and values need not be repeated.
fn one_query(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, TchError> {
    let (_, heads, head_dim) = q.size3()?;
    let kv_heads = k.size()[1];
    let by_head = |x: &Tensor| x.f_transpose(0, 1)?.f_unsqueeze(0);
    let q_kge = q.f_reshape([1, kv_heads, heads / kv_heads, head_dim])?;
    Tensor::f_scaled_dot_product_attention(
        &q_kge,
        &by_head(k)?,
        &by_head(v)?,
        None::<&Tensor>,
        0.0,
        false,
        None,
        false,
    )?
    .f_reshape([1, heads, head_dim])
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn one_query_is_the_last_row_of_all_queries() {
        tch::manual_seed(3);
        let [q, k, v] =
            [6, 2, 2].map(|heads| Tensor::randn([40, heads, 16], (Kind::Float, Device::Cpu)));
        let documents = Documents::from_lengths(&[40]).unwrap();
        for window in [
            None,
            NonZero::new(1),
            NonZero::new(9),
            NonZero::new(usize::MAX),
        ] {
            let mask = window.map_or(Mask::Causal, Mask::Window);
            let all = sdpa(&q, &k, &v, &documents, mask).unwrap();
            let attention = CachedAttention {
                mask,
                layers: RefCell::new(vec![None]),
            };
            for (start, rows) in [(0, 25)].into_iter().chain((25..40).map(|t| (t, 1))) {
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(0, start, rows));
                let documents = Documents::from_lengths(&[rows as usize]).unwrap();
                let o = attention.attend(0, &q, &k, &v, &documents).unwrap();
                let expected = all.narrow(0, start, rows);
                assert!(o.allclose(&expected, 1e-5, 1e-6, false), "{mask:?} {start}");
            }
        }
    }
}
