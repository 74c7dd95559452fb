//! The quantiser on a GPU, byte for byte. `cargo test --features cuda -- --ignored` on a machine that
//! has a Hopper GPU, and NVRTC.

mod quantised;

use std::collections::HashMap;

use flamia_cuda::{Buffer, Gpu, Graph, Stream};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{
    Forms, ForwardOutput, Quantisation, QuantiseCall, QuantiseError, QuantisedLayout, Quantiser,
};
use flamia_kernels::cuda::retile::{Image, Retiler, Retiling};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_sched::Documents;
use half::bf16;
use quantised::{Packed, compare, expected};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

/// What scratch is filled with: NaN as a code and as a float.
const POISON: u8 = 0xff;
/// Bytes after the scratch that nobody may touch.
const GUARD: usize = 1 << 12;

fn gpu() -> Gpu {
    Gpu::new(0).unwrap_or_else(|error| panic!("{error}"))
}

fn quantisers(gpu: &Gpu) -> HashMap<Quantisation, Quantiser> {
    let all: Vec<_> = Quantisation::all().collect();
    all.into_par_iter()
        .map(|quantisation| {
            let quantiser = Quantiser::new(gpu, quantisation);
            (
                quantisation,
                quantiser.unwrap_or_else(|error| panic!("{error}")),
            )
        })
        .collect()
}

/// Values that try every kind of block: each run of rows of a head is Gaussian at a size of its own,
/// zero with either sign, next to the ends of the float range, or has a NaN or an infinity in it.
fn values(documents: &Documents, heads: usize, dims: usize, rng: &mut impl Rng) -> Vec<bf16> {
    let row = heads * dims;
    let mut data = vec![bf16::ZERO; documents.total() * row];
    for rows in documents.iter() {
        for head in 0..heads {
            let mut start = rows.start;
            while start < rows.end {
                let end = rows.end.min(start + rng.random_range(1..100));
                let scale = match rng.random_range(0..10) {
                    0 => 0.0,
                    1 => 2f32.powi(rng.random_range(-126..-80)),
                    2 => 2f32.powi(rng.random_range(100..118)),
                    _ => 2f32.powi(rng.random_range(-20..20)),
                };
                for token in start..end {
                    for x in &mut data[token * row + head * dims..][..dims] {
                        let gaussian: f32 = StandardNormal.sample(rng);
                        *x = bf16::from_f32(gaussian * scale);
                    }
                }
                if rng.random_ratio(1, 12) {
                    let bad = [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY];
                    let token = rng.random_range(start..end);
                    let place = token * row + head * dims + rng.random_range(0..dims);
                    data[place] = bad[rng.random_range(0..3)];
                }
                start = end;
            }
        }
    }
    data
}

/// A tensor inside rows that have heads of others on both sides, all NaN.
fn packed(documents: &Documents, heads: usize, dims: usize, rng: &mut impl Rng) -> Packed {
    let before = rng.random_range(0..3);
    let row_heads = before + heads + rng.random_range(0..3);
    let mut data = vec![bf16::NAN; documents.total() * row_heads * dims];
    let own = values(documents, heads, dims, rng);
    let rows = data.chunks_exact_mut(row_heads * dims);
    for (row, own) in rows.zip(own.chunks_exact(heads * dims)) {
        row[before * dims..][..heads * dims].copy_from_slice(own);
    }
    Packed {
        data,
        row_heads,
        heads: before..before + heads,
        head_dim: dims,
    }
}

/// A tensor's copy on the GPU.
struct OnGpu {
    buffer: Buffer<u16>,
    tensor: DeviceTensor,
}

impl OnGpu {
    fn new(gpu: &Gpu, name: &'static str, packed: &Packed) -> Self {
        let bits: Vec<u16> = packed.data.iter().map(|x| x.to_bits()).collect();
        // At least one element, so that an empty tensor has an address.
        let mut buffer = Buffer::filled(gpu, bits.len().max(1), POISON).unwrap();
        buffer.upload(&bits).unwrap();
        let dims = packed.head_dim;
        let row = packed.row_heads * dims;
        let tensor = DeviceTensor {
            name,
            address: buffer.pointer() + 2 * (packed.heads.start * dims) as u64,
            shape: [packed.data.len() / row, packed.heads.len(), dims],
            strides: [row, dims, 1],
        };
        Self { buffer, tensor }
    }
}

/// A packed row with all that a quantiser reads and writes, on both sides.
struct Case {
    documents: Documents,
    quantisation: Quantisation,
    layout: QuantisedLayout,
    input: Packed,
    output: Option<quantised::ForwardOutput>,
    device_input: OnGpu,
    device_output: Option<(OnGpu, Buffer<f32>)>,
    cu_seqlens: Buffer<i32>,
    scratch: Buffer<u8>,
}

impl Case {
    fn new(
        gpu: &Gpu,
        lengths: &[usize],
        heads: usize,
        quantisation: Quantisation,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let documents = Documents::from_lengths(lengths).unwrap();
        let dims = quantisation.head_dim.get();
        let input = packed(&documents, heads, dims, &mut rng);
        let has_output = quantisation.forms == Forms::BothWithRowSums;
        let output = has_output.then(|| quantised::ForwardOutput {
            o: packed(&documents, heads, dims, &mut rng),
            lse: (0..heads * documents.total())
                .map(|_| rng.random_range(-90.0..90.0))
                .collect(),
        });
        let layout = quantisation
            .layout(documents.total(), documents.len(), heads)
            .unwrap();
        Self {
            device_input: OnGpu::new(gpu, "x", &input),
            device_output: output.as_ref().map(|output| {
                let mut lse = Buffer::filled(gpu, output.lse.len().max(1), POISON).unwrap();
                lse.upload(&output.lse).unwrap();
                (OnGpu::new(gpu, "o", &output.o), lse)
            }),
            cu_seqlens: Buffer::from_slice(gpu, documents.cu_seqlens()).unwrap(),
            scratch: Buffer::filled(gpu, layout.bytes() + GUARD, POISON).unwrap(),
            documents,
            quantisation,
            layout,
            input,
            output,
        }
    }

    fn launch(&self, quantiser: &Quantiser, stream: Stream<'_>) -> Result<(), QuantiseError> {
        let call = QuantiseCall {
            input: self.device_input.tensor,
            output: self.device_output.as_ref().map(|(o, lse)| ForwardOutput {
                o: o.tensor,
                lse: lse.pointer(),
            }),
            cu_seqlens: self.cu_seqlens.pointer(),
            documents: self.documents.len(),
        };
        let scratch = Scratch {
            address: self.scratch.pointer(),
            bytes: self.layout.bytes(),
        };
        // SAFETY: the buffers are this case's, hold what the call says, and outlive the work: whatever
        // reads or drops one waits for the GPU.
        let quantised = unsafe { quantiser.launch(stream, &call, scratch)? };
        assert_eq!(quantised, self.layout.at(self.scratch.pointer()));
        Ok(())
    }

    fn poison(&mut self) {
        let poison = vec![POISON; self.scratch.len()];
        self.scratch.upload(&poison).unwrap();
    }

    fn check(&self, name: &str) {
        let found = self.scratch.download().unwrap();
        let (found, guard) = found.split_at(self.layout.bytes());
        assert!(
            guard.iter().all(|byte| *byte == POISON),
            "{name}: written past the scratch"
        );
        let output = self.output.as_ref();
        let (quantisation, layout) = (&self.quantisation, &self.layout);
        let expected = expected(
            &self.documents,
            &self.input,
            output,
            quantisation,
            layout,
            POISON,
        );
        compare(found, &expected, layout, name);
    }
}

fn run(gpu: &Gpu, quantiser: &Quantiser, lengths: &[usize], heads: usize, seed: u64) {
    let quantisation = *quantiser.quantisation();
    let case = Case::new(gpu, lengths, heads, quantisation, seed);
    let shown = &lengths[..lengths.len().min(40)];
    let name = format!("{quantisation:?}, {heads} heads, seed {seed}, lengths {shown:?}");
    let stream = gpu.context().default_stream();
    case.launch(quantiser, (&*stream).into())
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    case.check(&name);
}

fn random_lengths(rng: &mut impl Rng) -> Vec<usize> {
    const EDGES: [usize; 14] = [0, 0, 1, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65];
    let count = rng.random_range(1..30);
    let length = |_| match rng.random_bool(0.6) {
        true => EDGES[rng.random_range(0..EDGES.len())],
        false => rng.random_range(0..400),
    };
    (0..count).map(length).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn every_variant_is_bit_equal_to_the_formats_on_edges() {
    let gpu = gpu();
    let lengths = [1, 0, 0, 33, 31, 32, 1, 1, 64, 0, 130, 17];
    for (quantisation, quantiser) in quantisers(&gpu) {
        run(&gpu, &quantiser, &lengths, 3, 1);
        run(&gpu, &quantiser, &[0], 2, 2);
        run(&gpu, &quantiser, &[1], 1, 3);
        println!("{quantisation:?}: equal");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn random_packed_rows_are_bit_equal() {
    let gpu = gpu();
    let quantisers: Vec<_> = quantisers(&gpu).into_values().collect();
    (0..200u64).into_par_iter().for_each(|seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let quantiser = &quantisers[rng.random_range(0..quantisers.len())];
        let lengths = random_lengths(&mut rng);
        let heads = rng.random_range(1..17);
        run(&gpu, quantiser, &lengths, heads, seed);
    });
}

/// The search for a block's document takes one look up to 32 documents, two up to 1024, and so on.
#[test]
#[ignore = "needs a GPU"]
fn any_number_of_documents_is_searched() {
    let gpu = gpu();
    let quantisation = Quantisation {
        head_dim: HeadDim::D64,
        hadamard: false,
        forms: Forms::Row,
    };
    let quantiser = Quantiser::new(&gpu, quantisation).unwrap_or_else(|error| panic!("{error}"));
    for count in [31, 32, 33, 1023, 1024, 1025, 40_000] {
        let lengths: Vec<_> = (0..count)
            .map(|i| [1, 0, 2, 40, 0, 0, 32][i * i % 7])
            .collect();
        run(&gpu, &quantiser, &lengths, 1, count as u64);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_replayed_graph_reads_what_the_buffers_hold_then() {
    let gpu = gpu();
    let quantisation = Quantisation {
        head_dim: HeadDim::D128,
        hadamard: false,
        forms: Forms::BothWithRowSums,
    };
    let quantiser = Quantiser::new(&gpu, quantisation).unwrap_or_else(|error| panic!("{error}"));
    let stream = gpu.context().new_stream().unwrap();
    let stream = Stream::from(&*stream);
    let mut case = Case::new(&gpu, &[70, 1, 0, 200], 4, quantisation, 1);
    // SAFETY: the stream captures nothing else, and case and quantiser outlive the graph.
    let graph = unsafe { Graph::capture(&gpu, stream, |stream| case.launch(&quantiser, stream)) };
    let mut graph = graph.unwrap_or_else(|error| panic!("{error}"));

    graph.replay(stream).unwrap();
    case.check("first replay");
    let first = case.scratch.download().unwrap();
    case.poison();
    graph.replay(stream).unwrap();
    assert!(
        first == case.scratch.download().unwrap(),
        "two replays differ"
    );

    // Other documents of as many rows, and other values.
    case.documents = Documents::from_lengths(&[3, 67, 201, 0]).unwrap();
    case.cu_seqlens.upload(case.documents.cu_seqlens()).unwrap();
    let row = case.input.row_heads * case.input.head_dim;
    case.input.data.rotate_left(7 * row);
    let bits: Vec<u16> = case.input.data.iter().map(|x| x.to_bits()).collect();
    case.device_input.buffer.upload(&bits).unwrap();
    case.poison();
    graph.replay(stream).unwrap();
    case.check("replay over other documents");
}

/// Offsets past 2^31 elements and 2^32 bytes, in the input and in both images.
#[test]
#[ignore = "needs a GPU"]
fn tensors_of_more_than_two_to_the_31_elements_are_whole() {
    let gpu = gpu();
    let quantisation = Quantisation {
        head_dim: HeadDim::D128,
        hadamard: false,
        forms: Forms::Both,
    };
    let quantiser = Quantiser::new(&gpu, quantisation).unwrap_or_else(|error| panic!("{error}"));
    let (tokens, heads, dims) = (131_072, 130, 128);
    assert!(tokens * heads * dims > 1 << 31);
    let layout = quantisation.layout(tokens, 1, heads).unwrap();
    // Zeros in front, where an offset that wrapped would read, and a constant behind.
    let zeros = 4096;
    let mut input = Buffer::<u16>::filled(&gpu, tokens * heads * dims, 0x3c).unwrap();
    input.upload(&vec![0; zeros * heads * dims]).unwrap();
    let constant = bf16::from_bits(0x3c3c).to_f32();
    let block = flamia_format::blocks::TokenBlocks::quantize(
        &[constant; 32],
        1,
        flamia_format::ExponentRule::Up,
    );
    let code = block.codes[0].0;
    assert!(code != 0 && code != POISON);

    let scratch = Buffer::<u8>::filled(&gpu, layout.bytes(), POISON).unwrap();
    let cu_seqlens = Buffer::from_slice(&gpu, &[0, tokens as i32]).unwrap();
    let call = QuantiseCall {
        input: DeviceTensor::packed("x", input.pointer(), [tokens, heads, dims]),
        output: None,
        cu_seqlens: cu_seqlens.pointer(),
        documents: 1,
    };
    let memory = Scratch {
        address: scratch.pointer(),
        bytes: layout.bytes(),
    };
    let stream = gpu.context().default_stream();
    // SAFETY: the buffers have the sizes that are said, and the download waits for the work.
    let launched = unsafe { quantiser.launch((&*stream).into(), &call, memory) };
    launched.unwrap_or_else(|error| panic!("{error}"));
    let found = scratch.download().unwrap();

    let slots = layout.padded().slots();
    let at = layout.at(0);
    for part in [at.row_image, at.transposed_image].into_iter().flatten() {
        let image = &found[part as usize..][..layout.padded().image_bytes()];
        image
            .par_chunks(slots * dims)
            .enumerate()
            .for_each(|(head, image)| {
                let (front, rest) = image.split_at(zeros * dims);
                let (back, rest) = rest.split_at((tokens - zeros) * dims);
                assert!(front.iter().all(|byte| *byte == 0), "head {head}");
                assert!(back.iter().all(|byte| *byte == code), "head {head}");
                assert!(rest.iter().all(|byte| *byte == POISON), "head {head}");
            });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn calls_that_make_no_sense_are_refused() {
    let gpu = gpu();
    let d = Quantisation {
        head_dim: HeadDim::D128,
        hadamard: false,
        forms: Forms::BothWithRowSums,
    };
    let rotated = Quantisation {
        hadamard: true,
        ..d
    };
    let refused = Quantiser::new(&gpu, rotated).map(|_| ()).unwrap_err();
    assert!(
        matches!(refused, QuantiseError::RotatedRowSums),
        "{refused}"
    );

    let quantiser = Quantiser::new(&gpu, d).unwrap_or_else(|error| panic!("{error}"));
    let stream = gpu.context().default_stream();
    let launch = |case: &Case| case.launch(&quantiser, (&*stream).into()).unwrap_err();
    let mut case = Case::new(&gpu, &[5], 2, d, 1);
    let output = case.device_output.take();
    let refused = launch(&case).to_string();
    assert!(refused.contains("need O"), "{refused}");
    case.device_output = output;
    case.device_input.tensor.address += 2;
    let refused = launch(&case).to_string();
    assert!(refused.contains("16 bytes"), "{refused}");
    case.device_input.tensor.address -= 2;
    case.device_input.tensor.shape[2] = 64;
    let refused = launch(&case).to_string();
    assert!(refused.contains("[5, 2, 64]"), "{refused}");
    case.device_input.tensor.shape[2] = 128;
    case.layout = d.layout(4, 0, 1).unwrap();
    let refused = launch(&case).to_string();
    assert!(refused.contains("bytes of scratch"), "{refused}");
    assert!(
        case.scratch
            .download()
            .unwrap()
            .iter()
            .all(|byte| *byte == POISON)
    );
}

/// Either image gives the other, byte for byte, also where no document lies.
#[test]
#[ignore = "needs a GPU"]
fn an_image_gives_the_other() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(31));
    let stream = gpu.context().new_stream().unwrap();
    let documents = Documents::from_lengths(&[70, 1, 0, 200, 33]).unwrap();
    for retiling in Retiling::all() {
        let quantisation = Quantisation {
            head_dim: retiling.head_dim,
            hadamard: false,
            forms: Forms::Both,
        };
        let dims = retiling.head_dim.get();
        let input = packed(&documents, 3, dims, &mut rng);
        let layout = quantisation
            .layout(documents.total(), documents.len(), 3)
            .unwrap();
        let bytes = expected(&documents, &input, None, &quantisation, &layout, POISON);
        let images = [layout.at(0).row_image, layout.at(0).transposed_image];
        let [row, transposed] = images.map(|image| {
            let first = image.unwrap() as usize;
            &bytes[first..][..layout.padded().image_bytes()]
        });
        let (from, to) = match retiling.to {
            Image::Row => (transposed, row),
            Image::Transposed => (row, transposed),
        };
        let from = Buffer::from_slice(&gpu, from).unwrap();
        let made = Buffer::<u8>::filled(&gpu, to.len() + GUARD, POISON).unwrap();
        let retiler = Retiler::new(&gpu, retiling).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: both buffers hold an image of the layout, and the download waits.
        unsafe {
            retiler
                .launch(
                    (&*stream).into(),
                    from.pointer(),
                    made.pointer(),
                    layout.padded(),
                )
                .unwrap();
        }
        let made = made.download().unwrap();
        let differs = made.iter().zip(to).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{retiling:?}");
        assert!(
            made[to.len()..].iter().all(|x| *x == POISON),
            "{retiling:?}"
        );
    }
}
