//! What a core makes of a cache: `cargo bench -p datasets`.
//!
//! - `stream`: tokens in packed rows a second, from the cache on disk.
//! - `pack`: a million documents laid into rows.
//! - `tokenise`: bytes of text a second on all cores, if `BENCH_TOKENIZER` names a tokenizer.json
//!   and `BENCH_TEXT` a Parquet file; docs/data.md tells how to compare with Python.

use std::path::{Path, PathBuf};

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use datasets::bin_file::{Header, Width};
use datasets::pack::Packer;
use datasets::{
    Cache, Dataset, OpenOptions, Packing, ParquetReader, PrepareOptions, Selection, SpecialIds,
    Tokenizer, prepare,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Lengths like FineWeb-Edu's: quartiles 349, 629 and 1,091 tokens, some far longer.
fn lengths(count: usize) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let length = |_| {
        // Nearly normal: the sum of twelve uniform numbers.
        let normal: f64 = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
        ((6.444 + 0.9 * normal).exp() as u32).clamp(10, 170_000)
    };
    (0..count).map(length).collect()
}

/// A cache of random bytes as tokens.
fn cache(folder: &Path) -> Cache {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut ids: Vec<u16> = Vec::new();
    for length in lengths(40_000) {
        ids.push(256);
        ids.extend((0..length).map(|_| u16::from(rng.random::<u8>())));
    }
    let header = Header {
        width: Width::U16,
        tokens: ids.len() as u64,
    };
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    let source = folder.join("random.bin");
    let file: Vec<u8> = header.to_bytes().into_iter().chain(bytes).collect();
    std::fs::write(&source, file).unwrap();
    let (tokenizer, options) = (Tokenizer::byte_level(), PrepareOptions::default());
    prepare(
        &[source],
        &tokenizer,
        &folder.join("cache"),
        &options,
        &mut |_| {},
    )
    .unwrap()
}

fn stream(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(folder.path());
    let mut group = criterion.benchmark_group("stream");
    for packing in Packing::ALL {
        for row_tokens in [2048, 8192, 131_072] {
            let options = OpenOptions {
                packing,
                ..OpenOptions::new(row_tokens)
            };
            let dataset = Dataset::of_cache(cache.clone(), options).unwrap();
            let mut rows = dataset.stream().unwrap();
            group.throughput(Throughput::Elements(row_tokens as u64));
            group.bench_function(format!("{packing}/{row_tokens}"), |bencher| {
                bencher.iter(|| rows.next().unwrap().unwrap());
            });
        }
    }
}

fn pack(criterion: &mut Criterion) {
    let lengths = lengths(1_000_000);
    let mut group = criterion.benchmark_group("pack");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.throughput(Throughput::Elements(lengths.len() as u64));
    for packing in Packing::ALL {
        for row_tokens in [2048, 8192, 131_072] {
            group.bench_function(format!("{packing}/{row_tokens}"), |bencher| {
                bencher.iter(|| {
                    let documents = lengths.iter().map(|length| length + 1).enumerate();
                    Packer::new(documents, packing, row_tokens).count()
                });
            });
        }
    }
}

fn tokenise(criterion: &mut Criterion) {
    let file = |name| std::env::var_os(name).map(PathBuf::from);
    let (Some(tokenizer), Some(text)) = (file("BENCH_TOKENIZER"), file("BENCH_TEXT")) else {
        eprintln!("tokenise: skipped, BENCH_TOKENIZER and BENCH_TEXT name no files");
        return;
    };
    let tokenizer = Tokenizer::from_file(&tokenizer, SpecialIds::default()).unwrap();
    let records = ParquetReader::open(&text, &Selection::default()).unwrap();
    let texts: Vec<String> = records.filter_map(|record| record.unwrap().text).collect();
    let bytes = texts.iter().map(|text| text.len() as u64).sum();
    let mut group = criterion.benchmark_group("tokenise");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("batch", |bencher| {
        bencher.iter(|| tokenizer.encode_batch(&texts).unwrap());
    });
}

criterion_group!(benches, stream, pack, tokenise);
criterion_main!(benches);
