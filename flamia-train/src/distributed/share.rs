//! A rank's rows of a global batch.

use std::num::NonZero;

use datasets::Row;
use flamia_autograd::distributed::Member;
use flamia_sched::ranks::{Balance, StepTime, UnevenRows, share as share_out};
use flamia_sched::{Documents, DocumentsError, Mask, TILE};

use crate::loss::Loss;
use crate::model::ModelShape;

/// Queries and keys of a tile pair, whose count tells the time of attention.
const TILE_PAIRS: u64 = (TILE * TILE) as u64;

/// Why a global batch cannot be shared out.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// Not as many rows for each.
    #[error("{0}; the rows of a step are batch.rows times batch.accumulate")]
    Uneven(#[from] UnevenRows),
    /// A row that is none.
    #[error("a row's documents cannot be understood")]
    Documents(#[from] DocumentsError),
}

/// What a rank computes of a global batch, and what the batch is as a whole.
#[derive(Debug)]
pub struct Share {
    /// This rank's rows, in the batch's order.
    pub rows: Vec<Row>,
    /// What the batch's loss is summed over; no nats.
    pub counts: Loss,
    /// Pairs of a query and a key that the batch sees, without those of padding.
    pub pairs: u64,
}

/// Shares `rows` out among ranks, as many for each, so that a model of `shape` takes about as long for each.
///
/// # Errors
/// [`ShareError`].
pub fn share(
    rows: Vec<Row>,
    shape: &ModelShape,
    mask: Mask,
    member: Member,
) -> Result<Share, ShareError> {
    // Operations stand for time: what matters is how one token and one tile compare.
    let time = StepTime {
        per_token: shape.training_flops(1, 0),
        per_block: shape.training_flops(0, TILE_PAIRS),
    };
    let (mut counts, mut pairs, mut times) = (Loss::default(), 0, Vec::new());
    for row in &rows {
        let documents = Documents::from_cu_seqlens(&row.cu_seqlens, row.tokens.len())?;
        let padding = Documents::from_lengths(&[row.padding])?;
        pairs += documents.visible_pairs(mask) - padding.visible_pairs(mask);
        times.push(time.of(&documents, mask));
        counts.tokens += row.label_count() as u64;
        counts.bytes += row.bytes;
    }
    let ranks = NonZero::new(member.world).unwrap_or(NonZero::<usize>::MIN);
    let mut shares = share_out(&times, ranks, Balance::Refined)?;
    let mine = shares.rows.swap_remove(member.rank);
    let rows = rows
        .into_iter()
        .enumerate()
        .filter(|(index, _)| mine.binary_search(index).is_ok());
    Ok(Share {
        rows: rows.map(|(_, row)| row).collect(),
        counts,
        pairs,
    })
}
