//! `data show`: a training row as people can read it.

use std::process::ExitCode;

use datasets::{Cache, Dataset, IGNORE, OpenOptions, Position, Shuffle};

use crate::Outcome;
use crate::cli::ShowArgs;

/// Letters shown of each end of a text.
const EXCERPT: usize = 60;

pub fn show(args: &ShowArgs) -> Outcome {
    let options = OpenOptions {
        seed: args.seed,
        validation_fraction: args.validation_fraction,
        packing: args.packing,
        shuffle: Shuffle {
            block_tokens: args.block_tokens,
            blocks: args.blocks,
        },
        ..OpenOptions::new(args.row_tokens)
    };
    let dataset = Dataset::of_cache(Cache::open(&args.cache)?, options)?;
    let position = Position {
        epoch: args.epoch,
        row: args.row,
    };
    let (row, parts) = dataset.row_with_parts(position)?;
    println!(
        "row {} of epoch {}: {} tokens, {} padding, {} bytes of text",
        args.row,
        args.epoch,
        row.tokens.len(),
        row.padding,
        row.bytes
    );
    for (part, bounds) in parts.iter().zip(row.cu_seqlens.windows(2)) {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        println!(
            "\n{start}..{end}: labels {}..{} of {} of the document at token {} of {}",
            part.first_label,
            part.first_label + (end - start),
            part.document_labels,
            part.first_token,
            part.shard
        );
        let eos = i64::from(dataset.tokenizer().eos());
        let labels = &row.labels[start..end];
        let text = labels.strip_suffix(&[eos]).unwrap_or(labels);
        let ids: Vec<u32> = text
            .iter()
            .filter(|&&id| id != IGNORE)
            .filter_map(|&id| u32::try_from(id).ok())
            .collect();
        let text = dataset.tokenizer().decode(&ids)?;
        println!("{}", if args.full { text } else { excerpt(&text) });
    }
    Ok(ExitCode::SUCCESS)
}

/// Both ends of a text on one line.
fn excerpt(text: &str) -> String {
    let letters: Vec<char> = text.escape_debug().collect();
    if letters.len() <= 2 * EXCERPT {
        return letters.into_iter().collect();
    }
    let start: String = letters[..EXCERPT].iter().collect();
    let end: String = letters[letters.len() - EXCERPT..].iter().collect();
    format!("{start} ... {end}")
}
