//! Whole training calls on a GPU, schedule and quantisers included, against the CPU's `hopper` profile.
//! `cargo test --features cuda -- --ignored` on a machine that has a Hopper GPU, and NVRTC.

mod attention;
mod common;
mod quantised;

use std::fmt::Debug;
use std::num::NonZero;

use attention::check::distance;
use attention::gradients::{Backward, Canaried};
use attention::random::random_shape;
use attention::{HEAD_DIMS, Problem, Shape};
use flamia_cuda::{Buffer, Gpu, GpuError, Graph, Stream};
use flamia_kernels::cuda::call::{
    BackwardTensors, CallError, CallShape, CallTensors, Kernels, ONE_KERNEL_ROWS, SavedImages,
    Sections, TrainingPlan, Tuning,
};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_kernels::{BackwardForm, DqAccumulator, Mask, Options, Path, Profile};
use flamia_sched::Documents;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const NAMES: [&str; 3] = ["dQ", "dK", "dV"];
const IMAGES: [SavedImages; 2] = [SavedImages::One, SavedImages::Both];

/// What a training call is of.
#[derive(Clone, Copy, Debug)]
struct Way {
    images: SavedImages,
    backward: BackwardForm,
    dq: DqAccumulator,
    tuning: Tuning,
}

impl Way {
    fn saving(images: SavedImages) -> Self {
        Self {
            images,
            backward: BackwardForm::TwoKernel,
            dq: DqAccumulator::default(),
            tuning: Tuning::default(),
        }
    }

    /// With one kernel, whose sums of dQ these are.
    fn one_kernel(images: SavedImages, dq: DqAccumulator) -> Self {
        Self {
            backward: BackwardForm::OneKernel,
            dq,
            ..Self::saving(images)
        }
    }

    fn options(&self, mask: Mask) -> Options {
        Options {
            backward: self.backward,
            dq: self.dq,
            ..options(mask)
        }
    }
}

fn options(mask: Mask) -> Options {
    let mut options = Options::new(Path::Mxfp8, mask);
    options.profile = Profile::Hopper;
    options
}

fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn boundaries(documents: &Documents, entries: usize) -> Vec<i32> {
    let mut cu_seqlens = documents.cu_seqlens().to_vec();
    cu_seqlens.resize(entries, documents.total() as i32);
    cu_seqlens
}

/// Everything of one call in device memory.
struct Call {
    plan: TrainingPlan,
    /// Q, K, V and dO.
    operands: [Buffer<u16>; 4],
    o: Buffer<u16>,
    lse: Buffer<f32>,
    /// dQ, dK and dV.
    gradients: [Canaried; 3],
    cu_seqlens: Buffer<i32>,
    schedule: Buffer<u8>,
    saved: Buffer<u8>,
    scratch: Buffer<u8>,
}

impl Call {
    /// With room for `entries` boundaries, all of them past the documents' own the last one again.
    fn new(kernels: &Kernels, backward: &Backward, entries: usize, way: Way) -> Self {
        let gpu = kernels.gpu();
        let problem = &backward.problem;
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let documents = entries - 1;
        let shape = CallShape {
            documents,
            ..CallShape::of(&problem.documents, heads, kv_heads, head_dim.get())
        };
        let plan = kernels
            .tuned_training_plan(shape, &way.options(mask), way.images, way.tuning)
            .unwrap_or_else(|error| panic!("{error}"));
        let data = [&problem.q, &problem.k, &problem.v, &backward.d_o];
        let gradient = |name, heads| {
            let size = [shape.tokens, heads, shape.head_dim];
            Canaried::new(gpu, name, size)
        };
        let bytes = |count| Buffer::filled(gpu, count, 0xff).unwrap();
        Self {
            operands: data.map(|data| Buffer::from_slice(gpu, &bits(data)).unwrap()),
            o: Buffer::filled(gpu, shape.tokens * heads * shape.head_dim, 0xff).unwrap(),
            lse: Buffer::filled(gpu, shape.tokens * heads, 0xff).unwrap(),
            gradients: [
                gradient("dQ", heads),
                gradient("dK", kv_heads),
                gradient("dV", kv_heads),
            ],
            cu_seqlens: Buffer::from_slice(gpu, &boundaries(&problem.documents, entries)).unwrap(),
            schedule: bytes(plan.forward().schedule_layout().bytes),
            saved: bytes(plan.saved_bytes()),
            scratch: bytes(plan.scratch_bytes()),
            plan,
        }
    }

    fn tensor(&self, name: &'static str, buffer: &Buffer<u16>, heads: usize) -> DeviceTensor {
        let CallShape {
            tokens, head_dim, ..
        } = *self.plan.forward().shape();
        DeviceTensor::packed(name, buffer.pointer(), [tokens, heads, head_dim])
    }

    /// Gives both passes to the stream.
    fn give(&self, kernels: &Kernels, stream: Stream<'_>) -> Result<(), CallError> {
        let CallShape {
            heads, kv_heads, ..
        } = *self.plan.forward().shape();
        let [q, k, v, d_o] = &self.operands;
        let [dq, dk, dv] = [0, 1, 2].map(|i| self.gradients[i].tensor);
        let cu_seqlens = self.cu_seqlens.pointer();
        let tensors = CallTensors {
            q: self.tensor("q", q, heads),
            k: self.tensor("k", k, kv_heads),
            v: self.tensor("v", v, kv_heads),
            o: self.tensor("o", &self.o, heads),
            lse: self.lse.pointer(),
            cu_seqlens,
        };
        let backward = BackwardTensors {
            o: tensors.o,
            lse: tensors.lse,
            d_o: self.tensor("d_o", d_o, heads),
            dq,
            dk,
            dv,
            cu_seqlens,
        };
        let place = |buffer: &Buffer<u8>| Scratch {
            address: buffer.pointer(),
            bytes: buffer.len(),
        };
        let (saved, scratch) = (place(&self.saved), place(&self.scratch));
        let schedule = self.schedule.pointer();
        // SAFETY: all buffers are of the plan's sizes and outlive the download, which waits.
        unsafe {
            kernels.build_schedule(stream, self.plan.forward(), cu_seqlens, schedule)?;
            self.plan
                .forward()
                .launch(stream, &tensors, schedule, saved)?;
            self.plan
                .backward(stream, &backward, schedule, saved, scratch)
        }
    }

    /// dQ, dK and dV, if nothing around them was touched.
    fn gradients(&self) -> [Vec<f64>; 3] {
        [0, 1, 2].map(|i| {
            self.gradients[i]
                .values()
                .unwrap_or_else(|error| panic!("{error}"))
        })
    }
}

/// Close to the CPU's `hopper` profile with the same options.
fn check(found: &[Vec<f64>; 3], backward: &Backward, way: Way) {
    let wanted = backward.on_cpu_with(&Options {
        backward: way.backward,
        dq: way.dq,
        ..backward.problem.options(Path::Mxfp8)
    });
    let problem = &backward.problem;
    let Shape {
        heads, kv_heads, ..
    } = problem.shape;
    let mut are_near = true;
    let mut told = Vec::new();
    for ((name, found), (wanted, heads)) in NAMES.iter().zip(found).zip([
        (wanted.dq, heads),
        (wanted.dk, kv_heads),
        (wanted.dv, kv_heads),
    ]) {
        match distance(problem, name, heads, found, &wanted) {
            Ok(distance) => {
                are_near &= distance.cosine > 0.9999;
                told.push(format!("{name} {distance}"));
            }
            Err(error) => {
                are_near = false;
                told.push(error);
            }
        }
    }
    let told = format!("{}; {way:?} {:?}", told.join("; "), problem.shape);
    println!("{told}");
    assert!(are_near, "{told}");
}

fn kernels() -> Kernels {
    Kernels::new(Gpu::new(0).unwrap_or_else(|error| panic!("{error}")))
}

/// The same bits in the gradients of these names, or a panic that tells how far they are apart.
fn assert_same_bits(
    names: &[&str],
    found: &[Vec<f64>; 3],
    wanted: &[Vec<f64>; 3],
    case: &dyn Debug,
) {
    for ((name, found), wanted) in NAMES.iter().zip(found).zip(wanted) {
        if !names.contains(name) {
            continue;
        }
        assert_eq!(found.len(), wanted.len(), "{name}: {case:?}");
        let pairs = || found.iter().zip(wanted).enumerate();
        let differing = || pairs().filter(|(_, (a, b))| a.to_bits() != b.to_bits());
        if let Some((at, (a, b))) = differing().next() {
            let by = differing().map(|(_, (a, b))| (a - b).abs());
            panic!(
                "{name}: {} of {} entries have other bits, the first at {at}: {a:e} instead of {b:e}; by \
                 {:.1e} at most, where the largest is {:.1e}; {case:?}",
                differing().count(),
                found.len(),
                by.fold(0.0, f64::max),
                wanted.iter().fold(0.0, |m: f64, x| m.max(x.abs())),
            );
        }
    }
}

/// 24 random packed rows.
fn random_backwards(seed: u64) -> impl Iterator<Item = Backward> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let next = move || {
        loop {
            let problem = Problem::gaussian(random_shape(&mut rng), &mut rng);
            // Rows of a document's only key have gradients of rounding errors alone.
            if problem.tokens() >= 100 {
                return Some(Backward::gaussian(problem, &mut rng));
            }
        }
    };
    std::iter::from_fn(next).take(24)
}

#[test]
#[ignore = "needs a GPU"]
fn random_packed_rows_match_the_cpu_whatever_is_saved() {
    let kernels = kernels();
    let stream = kernels.gpu().context().new_stream().unwrap();
    for backward in random_backwards(11) {
        let entries = backward.problem.documents.len() + 1;
        let run = |way| {
            let call = Call::new(&kernels, &backward, entries, way);
            call.give(&kernels, (&*stream).into()).unwrap();
            call.gradients()
        };
        let [one, both] = IMAGES.map(|images| run(Way::saving(images)));
        check(&one, &backward, Way::saving(SavedImages::One));
        let shape = &backward.problem.shape;
        assert_same_bits(&NAMES, &both, &one, &("both images", shape));
        let apart = run(Way {
            tuning: Tuning {
                fuses_images: false,
                ..Tuning::default()
            },
            ..Way::saving(SavedImages::Both)
        });
        assert_same_bits(&NAMES, &apart, &one, &("both images, apart", shape));
        // How launches go out does not show.
        let single = Sections::Of(NonZero::<usize>::MIN);
        for tuning in [
            Tuning {
                starts_early: false,
                ..Tuning::default()
            },
            Tuning {
                overlaps_gradients: false,
                sections: Sections::Whole,
                ..Tuning::default()
            },
            Tuning {
                sections: single,
                ..Tuning::default()
            },
        ] {
            let found = run(Way {
                tuning,
                ..Way::saving(SavedImages::One)
            });
            assert_same_bits(&NAMES, &found, &one, &(tuning, shape));
        }
    }
}

/// dV of one kernel is that of two. Under a window, one kernel walks on to the last tile of the item, which some
/// of its keys are not seen by: a product with zeros truncates their accumulators once more than two kernels do,
/// by less than a unit of BF16.
fn assert_values_of_two_kernels(
    found: &[Vec<f64>; 3],
    two_kernels: &[Vec<f64>; 3],
    problem: &Problem,
    way: Way,
) {
    let Shape { kv_heads, mask, .. } = problem.shape;
    let case = format!("beside two kernels, {way:?} {:?}", problem.shape);
    if !matches!(mask, Mask::Window(_)) {
        return assert_same_bits(&["dV"], found, two_kernels, &case);
    }
    let distance = distance(problem, "dV", kv_heads, &found[2], &two_kernels[2])
        .unwrap_or_else(|error| panic!("{error}; {case}"));
    assert!(distance.moved == 0, "dV {distance}; {case}");
}

/// Both kinds of sums, and both choices of what is saved: dK and dV do not depend on either. dV is that of two
/// kernels; dK is not, of whose dS is BF16 here and E4M3 there.
#[test]
#[ignore = "needs a GPU"]
fn one_kernel_matches_the_cpu_with_the_same_options() {
    let kernels = kernels();
    let stream = kernels.gpu().context().new_stream().unwrap();
    for backward in random_backwards(13) {
        let entries = backward.problem.documents.len() + 1;
        let run = |way| {
            let call = Call::new(&kernels, &backward, entries, way);
            // The scratch of a pass is no clean slate for the next.
            for _ in 0..2 {
                call.give(&kernels, (&*stream).into()).unwrap();
            }
            call.gradients()
        };
        let shape = &backward.problem.shape;
        let two_kernels = run(Way::saving(SavedImages::One));
        let mut first = None;
        for images in IMAGES {
            for dq in [DqAccumulator::Fp16, DqAccumulator::Fp32] {
                let way = Way::one_kernel(images, dq);
                let found = run(way);
                check(&found, &backward, way);
                assert_values_of_two_kernels(&found, &two_kernels, &backward.problem, way);
                let first = first.get_or_insert_with(|| found.clone());
                assert_same_bits(&["dK", "dV"], &found, first, &(way, shape));
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_serves_other_documents_of_the_same_length() {
    let kernels = kernels();
    let gpu = kernels.gpu();
    let (total, entries) = (1500, 12);
    let mut rng = ChaCha8Rng::seed_from_u64(12);
    let stream = gpu.context().new_stream().unwrap();
    let ways = [
        Way::saving(SavedImages::One),
        Way::saving(SavedImages::Both),
        Way::one_kernel(SavedImages::One, DqAccumulator::Fp16),
    ];
    for (way, head_dim) in ways.into_iter().zip(HEAD_DIMS.into_iter().cycle()) {
        let shape = |lengths| Shape {
            lengths,
            heads: 4,
            kv_heads: 2,
            head_dim,
            mask: Mask::Causal,
        };
        let random = |lengths, rng: &mut ChaCha8Rng| {
            Backward::gaussian(Problem::gaussian(shape(lengths), rng), rng)
        };
        let mut call = Call::new(&kernels, &random(vec![total], &mut rng), entries, way);
        // SAFETY: the call's buffers and kernels outlive the replays.
        let mut graph = unsafe {
            Graph::capture(gpu, (&*stream).into(), |stream| {
                call.give(&kernels, stream)
                    .map_err(|error| panic!("{error}"))
            })
            .unwrap_or_else(|error: GpuError| panic!("{error}"))
        };
        for lengths in [vec![500; 3], vec![1, 0, 1100, 399], vec![150; 10]] {
            let backward = random(lengths, &mut rng);
            let problem = &backward.problem;
            let data = [&problem.q, &problem.k, &problem.v, &backward.d_o];
            for (buffer, data) in call.operands.iter_mut().zip(data) {
                buffer.upload(&bits(data)).unwrap();
            }
            call.cu_seqlens
                .upload(&boundaries(&problem.documents, entries))
                .unwrap();
            for gradient in &mut call.gradients {
                gradient.forget();
            }
            graph.replay((&*stream).into()).unwrap();
            let replayed = call.gradients();
            check(&replayed, &backward, way);

            let eager = Call::new(&kernels, &backward, problem.documents.len() + 1, way);
            eager.give(&kernels, (&*stream).into()).unwrap();
            let eager = eager.gradients();
            match way.backward {
                BackwardForm::TwoKernel => {
                    assert_same_bits(&NAMES, &replayed, &eager, &(way, &problem.shape));
                }
                // Its dQ is added up in another order each time.
                BackwardForm::Auto | BackwardForm::OneKernel => check(&eager, &backward, way),
            }
        }
    }
}

/// The form that the rule names runs: the same numbers as if the options had.
#[test]
#[ignore = "needs a GPU"]
fn auto_runs_the_form_of_the_rule() {
    let kernels = kernels();
    let mut rng = ChaCha8Rng::seed_from_u64(14);
    let stream = kernels.gpu().context().new_stream().unwrap();
    let long = vec![ONE_KERNEL_ROWS];
    let two_short = vec![ONE_KERNEL_ROWS, 0, 300];
    for (lengths, kv_heads, dq, form) in [
        (
            long.clone(),
            2,
            DqAccumulator::Fp16,
            BackwardForm::OneKernel,
        ),
        (
            long.clone(),
            2,
            DqAccumulator::Fp32,
            BackwardForm::TwoKernel,
        ),
        (long, 1, DqAccumulator::Fp16, BackwardForm::OneKernel),
        (two_short, 2, DqAccumulator::Fp16, BackwardForm::TwoKernel),
    ] {
        let shape = Shape {
            lengths,
            heads: 2,
            kv_heads,
            head_dim: HEAD_DIMS[1],
            mask: Mask::Causal,
        };
        let backward = Backward::gaussian(Problem::gaussian(shape, &mut rng), &mut rng);
        let run = |way| {
            let entries = backward.problem.documents.len() + 1;
            let call = Call::new(&kernels, &backward, entries, way);
            assert_eq!(call.plan.form().form, form, "{way:?}");
            call.give(&kernels, (&*stream).into()).unwrap();
            call.gradients()
        };
        let named = Way {
            backward: form,
            dq,
            ..Way::saving(SavedImages::One)
        };
        let by_rule = run(Way {
            backward: BackwardForm::Auto,
            ..named
        });
        // The CPU's rule is another one: it is given the form that ran.
        check(&by_rule, &backward, named);
        let alike: &[&str] = match form {
            BackwardForm::OneKernel => &["dK", "dV"],
            _ => &NAMES,
        };
        assert_same_bits(
            alike,
            &by_rule,
            &run(named),
            &(named, &backward.problem.shape),
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_plan_tells_what_it_takes() {
    let kernels = kernels();
    let shape = CallShape {
        tokens: 4096,
        documents: 1,
        heads: 8,
        kv_heads: 2,
        head_dim: 128,
    };
    let plan = |images| {
        kernels
            .training_plan(shape, &Way::saving(images).options(Mask::Causal), images)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let [one, both] = IMAGES.map(plan);
    let bf16 = 2 * 4096 * 128 * (8 + 2 + 2);
    println!(
        "saved of Q, K and V: {} bytes with one image, {} with both, {bf16} in BF16; scratch of the \
         backward pass: {} and {}",
        one.saved_bytes(),
        both.saved_bytes(),
        one.scratch_bytes(),
        both.scratch_bytes()
    );
    assert!(one.saved_bytes() < bf16 * 11 / 20);
    assert!(both.saved_bytes() < bf16 * 11 / 10);
    assert_eq!(
        one.saved_bytes() + one.scratch_bytes(),
        both.saved_bytes() + both.scratch_bytes()
    );

    // An image has a code for each feature and row, and for those of the block that each document has to spare.
    let image = |heads: usize| heads * (4096 + 32) * 128;
    assert_eq!(
        both.saved_bytes() - one.saved_bytes(),
        image(8) + 2 * image(2)
    );
    for (dq, bytes) in [(DqAccumulator::Fp16, 2), (DqAccumulator::Fp32, 4)] {
        let [fused, fused_both] = IMAGES.map(|images| {
            let options = Way::one_kernel(images, dq).options(Mask::Causal);
            let plan = kernels.training_plan(shape, &options, images);
            plan.unwrap_or_else(|error| panic!("{error}"))
        });
        // With one kernel, sums of dQ, BF16 values of Q and an exponent for each document and key/value head
        // beside; but no transposed image of Q and K.
        assert_eq!(fused.saved_bytes(), one.saved_bytes(), "{dq}");
        assert_eq!(
            fused.scratch_bytes() + image(8) + image(2),
            one.scratch_bytes() + (bytes + 2) * image(8) + 2 * size_of::<f32>(),
            "{dq}"
        );
        // V's other image is all that can be saved as well.
        assert_eq!(
            fused_both.saved_bytes() - fused.saved_bytes(),
            image(2),
            "{dq}"
        );
        assert_eq!(
            fused.scratch_bytes() - fused_both.scratch_bytes(),
            image(2),
            "{dq}"
        );
    }

    let refusal = |change: &dyn Fn(&mut Options)| {
        let mut options =
            Way::one_kernel(SavedImages::One, DqAccumulator::Fp16).options(Mask::Causal);
        change(&mut options);
        let refused = kernels.training_plan(shape, &options, SavedImages::One);
        refused.err().map(|error| error.to_string())
    };
    let told = refusal(&|options| options.dq = DqAccumulator::Fp16Causal);
    assert!(told.is_some_and(|told| told.contains("fp16-causal")));

    let mut inference = options(Mask::Causal);
    inference.exponential = flamia_kernels::Exponential::Schraudolph;
    let refused = kernels.training_plan(shape, &inference, SavedImages::One);
    assert!(refused.is_err());
}
