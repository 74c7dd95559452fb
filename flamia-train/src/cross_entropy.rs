//! Cross-entropy of an output head, without ever holding the logits of all tokens.
//!
//! A vocabulary of 128,256 makes 33 GB of FP32 logits of 64k tokens. Here a chunk of tokens at a time
//! gets its logits, their loss and, since the loss is a sum, its share of the gradients, which the
//! backward pass only scales. The logits are computed once.

use flamia_autograd::{FunctionError, apply_fn};
use tch::{Kind, TchError, Tensor};

use crate::model::IGNORED_LABEL;

/// The cross-entropy in nats of the logits `hidden` `[T, D]` times `head` `[V, D]` transposed, summed
/// over the `labels` `[T]` that are not [`IGNORED_LABEL`], with the logits of at most `chunk` tokens
/// in memory.
///
/// Products have the kind of `hidden`; softmax, loss and the sum of the head's gradient are FP32.
///
/// # Errors
/// torch's, as for a label outside of the vocabulary.
pub fn chunked_cross_entropy(
    hidden: &Tensor,
    head: &Tensor,
    labels: &Tensor,
    chunk: i64,
) -> Result<Tensor, FunctionError> {
    let outputs = apply_fn(
        "chunked cross-entropy",
        &[Some(hidden), Some(head)],
        |ctx, _| {
            let wanted = ctx.needs_input_grad(0) || ctx.needs_input_grad(1);
            let (loss, gradients) = loss_and_gradients(hidden, head, labels, chunk, wanted)?;
            if let Some([d_hidden, d_head]) = &gradients {
                ctx.save_for_backward(&[d_hidden, d_head]);
            }
            Ok(vec![loss])
        },
        |ctx, grads| {
            let Some(scale) = &grads[0] else {
                return Ok(vec![None, None]);
            };
            let scaled = |of: &Tensor| of.f_mul(&scale.f_to_kind(of.kind())?);
            let [d_hidden, d_head] = [0, 1].map(|i| scaled(&ctx.saved()[i]));
            Ok(vec![Some(d_hidden?), Some(d_head?)])
        },
    );
    Ok(outputs?.swap_remove(0))
}

type Gradients = [Tensor; 2];

fn loss_and_gradients(
    hidden: &Tensor,
    head: &Tensor,
    labels: &Tensor,
    chunk: i64,
    gradients: bool,
) -> Result<(Tensor, Option<Gradients>), TchError> {
    let tokens = hidden.size()[0];
    let place = (Kind::Float, hidden.device());
    let mut loss = Tensor::f_zeros([] as [i64; 0], place)?;
    let mut d_head = Tensor::f_zeros(head.size(), place)?;
    let mut d_hidden = Vec::new();
    for start in (0..tokens).step_by(chunk.max(1) as usize) {
        let rows = chunk.max(1).min(tokens - start);
        let hidden = hidden.f_narrow(0, start, rows)?;
        let labels = labels.f_narrow(0, start, rows)?;
        let logits = hidden.f_matmul(&head.f_tr()?)?.f_to_kind(Kind::Float)?;
        let log_p = logits.f_log_softmax(-1, Kind::Float)?;
        let is_label = labels.f_ne(IGNORED_LABEL)?;
        let column = labels.f_where_self(&is_label, &labels.f_zeros_like()?)?;
        let column = column.f_unsqueeze(1)?;
        let weight = is_label.f_to_kind(Kind::Float)?.f_unsqueeze(1)?;
        let nats = log_p.f_gather(1, &column, false)?.f_mul(&weight)?;
        let _ = loss.f_sub_(&nats.f_sum(Kind::Float)?)?;
        if gradients {
            // softmax - one_hot(label), and nothing where there is no label.
            let mut d_logits = log_p.f_exp()?;
            let _ = d_logits.f_scatter_add_(1, &column, &weight.f_neg()?)?;
            let d_logits = d_logits.f_mul_(&weight)?.f_to_kind(hidden.kind())?;
            d_hidden.push(d_logits.f_matmul(head)?);
            let _ = d_head.f_add_(&d_logits.f_tr()?.f_matmul(&hidden)?)?;
        }
    }
    let gradients = match (gradients, d_hidden.is_empty()) {
        (false, _) => None,
        (true, true) => Some([hidden.f_zeros_like()?, d_head]),
        (true, false) => Some([Tensor::f_cat(&d_hidden, 0)?, d_head]),
    };
    Ok((loss, gradients))
}
