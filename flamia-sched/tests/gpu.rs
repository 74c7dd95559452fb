//! Schedules built on a GPU against those built on the CPU, bit for bit.
#![cfg(feature = "cuda")]

use std::num::NonZero;
use std::sync::Arc;

use flamia_cuda::{
    Arch, Buffer, CompileError, Compiler, Cubin, Gpu, Graph, Launch, PARAMETERS_HEADER, Program,
    Source,
};
use flamia_sched::cuda::{
    Boundary, BuildCall, CLAIM_HEADER, DeviceSchedule, HostSchedule, SCHEDULE_HEADER, SOURCE,
    ScheduleError, ScheduleHeader, ScheduleKernels, schedule_defines,
};
use flamia_sched::work::{Acquisition, HeadSections, Pass};
use flamia_sched::{Documents, DocumentsError, Mask};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const WALK: Source = Source {
    name: "flamia-sched/tests/walk.cu",
    text: include_str!("walk.cu"),
    headers: &[PARAMETERS_HEADER, SCHEDULE_HEADER],
};

const CLAIM: Source = Source {
    name: "flamia-sched/tests/claim.cu",
    text: include_str!("claim.cu"),
    headers: &[CLAIM_HEADER, PARAMETERS_HEADER, SCHEDULE_HEADER],
};

fn compile(
    source: &Source,
    defines: &[(&str, String)],
    arch: Arch,
) -> Result<Arc<Cubin>, CompileError> {
    let compiler = Compiler::shared().unwrap_or_else(|error| panic!("{error}"));
    compiler.compile(&Program {
        source,
        defines,
        arch,
    })
}

/// No Blackwell has run this.
#[test]
fn claims_of_blackwell_compile_for_it_alone() {
    let defines = schedule_defines();
    for arch in [Arch::Sm100a, Arch::Sm103a] {
        let cubin = compile(&CLAIM, &defines, arch).unwrap();
        cubin.refuse_spills().unwrap();
    }
    assert!(compile(&CLAIM, &defines, Arch::Sm90a).is_err());
}

#[test]
fn every_kernel_compiles_without_spills() {
    for arch in [Arch::Sm80, Arch::Sm90a, Arch::Sm100a, Arch::Sm103a] {
        for boundary in Boundary::ALL {
            let cubin = compile(&SOURCE, &boundary.defines(), arch).unwrap();
            assert_eq!(cubin.kernels.len(), 4, "{arch}");
            assert_eq!(cubin.warnings, [""; 0], "{arch}");
            cubin.refuse_spills().unwrap();
        }
        let cubin = compile(&WALK, &schedule_defines(), arch).unwrap();
        cubin.refuse_spills().unwrap();
    }
}

/// Every field that the host names is one that the kernels compare.
#[test]
fn a_struct_that_differs_from_the_host_s_does_not_compile() {
    let sound = Boundary::Int32.defines();
    let mut compared = 0;
    for index in 0..sound.len() {
        let mut defines = sound.clone();
        let (name, value) = &mut defines[index];
        let Some(field) = name
            .strip_prefix("OFFSET_")
            .or(name.strip_prefix("SIZEOF_"))
        else {
            continue;
        };
        *value = (value.parse::<usize>().unwrap() + 4).to_string();
        let error = compile(&SOURCE, &defines, Arch::Sm90a).unwrap_err();
        let place = field.replacen('_', "::", 1);
        assert!(error.to_string().contains(&place), "{place}: {error}");
        compared += 1;
    }
    // Of `BuildParams` and of `ScheduleHeader`, and the length of each.
    assert_eq!(compared, 13 + 9 + 2);
}

/// Of the backward pass, by the number of documents; with the smallest there are more than a list has.
const SECTION_ROWS: [usize; 3] = [usize::MAX, 4096, 7];

/// A GPU with everything that these tests use of it.
struct Bench {
    gpu: Gpu,
    kernels: ScheduleKernels,
}

impl Bench {
    fn new() -> Self {
        let gpu = Gpu::new(0).unwrap();
        let kernels = ScheduleKernels::new(&gpu, Boundary::Int32).unwrap();
        Self { gpu, kernels }
    }

    /// Builds what these boundaries say, in a buffer for `total` rows.
    fn build(
        &self,
        cu_seqlens: &[i32],
        total: usize,
        call: impl FnOnce(u64, usize) -> BuildCall,
    ) -> Result<HostSchedule, ScheduleError> {
        let boundaries = Buffer::from_slice(&self.gpu, cu_seqlens).unwrap();
        let mut schedule = DeviceSchedule::new(&self.gpu, total)?;
        let stream = self.gpu.context().default_stream();
        let call = call(boundaries.pointer(), boundaries.len());
        // SAFETY: the boundaries live until the download, which waits.
        unsafe { schedule.build(&self.kernels, (&*stream).into(), &call)? };
        schedule.download()
    }

    fn check(&self, documents: &Documents, mask: Mask, item_rows: [usize; 2]) {
        let call = |pointer, entries| BuildCall {
            item_rows,
            section_rows: [
                usize::MAX,
                SECTION_ROWS[documents.len() % SECTION_ROWS.len()],
            ],
            ..BuildCall::new(pointer, entries, mask)
        };
        let built = self
            .build(documents.cu_seqlens(), documents.total(), call)
            .unwrap();
        let wanted = HostSchedule::new(documents, &call(0, 0));
        // Not assert_eq: a hundred thousand items are no message.
        assert_eq!(built.summary, wanted.summary);
        assert_eq!(first_difference(&built.rows, &wanted.rows), None);
        assert_eq!(first_difference(&built.tiles, &wanted.tiles), None);
        assert_eq!(first_difference(&built.forward, &wanted.forward), None);
        assert_eq!(first_difference(&built.backward, &wanted.backward), None);
    }
}

fn first_difference<T: PartialEq + Copy>(
    found: &[T],
    wanted: &[T],
) -> Option<(usize, Option<T>, Option<T>)> {
    let longer = found.len().max(wanted.len());
    let mut pairs = (0..longer).map(|i| (i, found.get(i).copied(), wanted.get(i).copied()));
    pairs.find(|(_, found, wanted)| found != wanted)
}

fn masks() -> impl Strategy<Value = Mask> {
    prop_oneof![
        Just(Mask::Causal),
        Just(Mask::Full),
        (1usize..3000).prop_map(Mask::window),
        Just(Mask::window(usize::MAX)),
    ]
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let short = prop::collection::vec(0usize..4, 0..6000);
    let mixed = prop_oneof![
        3 => Just(0usize),
        3 => Just(1usize),
        3 => prop_oneof![Just(32), Just(64), Just(127), Just(128), Just(129), Just(255), Just(256), Just(257)],
        3 => 1usize..3000,
        1 => 1usize..20_000,
    ];
    prop_oneof![short, prop::collection::vec(mixed, 0..60)]
}

fn cases(cases: u32) -> TestRunner {
    TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    })
}

#[test]
#[ignore = "needs a GPU"]
fn random_rows_get_the_cpus_schedule() {
    let bench = Bench::new();
    let rows = prop_oneof![Just(64usize), Just(128), Just(192), Just(256), 1usize..400];
    let rows = (rows.clone(), rows).prop_map(|(forward, backward)| [forward, backward]);
    cases(400)
        .run(&(lengths(), masks(), rows), |(lengths, mask, item_rows)| {
            let lengths = if lengths.is_empty() { vec![0] } else { lengths };
            bench.check(&Documents::from_lengths(&lengths).unwrap(), mask, item_rows);
            Ok(())
        })
        .unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn extreme_rows_get_the_cpus_schedule() {
    let bench = Bench::new();
    let paper = [256, 128];
    let check = |lengths: &[usize], mask| {
        bench.check(&Documents::from_lengths(lengths).unwrap(), mask, paper);
    };
    for mask in [Mask::Causal, Mask::Full, Mask::window(300)] {
        check(&[0], mask);
        check(&[0, 0, 0], mask);
        check(&[1], mask);
        check(&[131_072], mask);
        check(&vec![1; 131_072], mask);
        check(&vec![1; 131_073], mask);
        check(
            &[&[0; 70_000][..], &[1; 70_000], &[0; 70_000]].concat(),
            mask,
        );
        // One merge more.
        check(&vec![1; 300_001], mask);
        check(&[&vec![3; 99_999][..], &[1_000_003]].concat(), mask);
        // Every run length of a single CTA.
        for items in [2, 3, 255, 256, 257, 511, 512, 513, 8191, 8192, 8193] {
            check(&vec![1; items], mask);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_items_that_a_cta_sorts_do_not_depend_on_luck() {
    let bench = Bench::new();
    // Items arrive in the order of the atomics: many rounds see many orders.
    let lengths: Vec<_> = (0..20_000).map(|i| 1 + i * 7919 % 11).collect();
    let documents = Documents::from_lengths(&lengths).unwrap();
    for _ in 0..50 {
        bench.check(&documents, Mask::Causal, [2, 3]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn boundaries_of_64_bits_give_the_same() {
    let gpu = Gpu::new(0).unwrap();
    let kernels = ScheduleKernels::new(&gpu, Boundary::Int64).unwrap();
    let documents = Documents::from_lengths(&[300, 0, 1, 5000, 129]).unwrap();
    let wide: Vec<_> = documents
        .cu_seqlens()
        .iter()
        .copied()
        .map(i64::from)
        .collect();
    let mut schedule = DeviceSchedule::new(&gpu, documents.total()).unwrap();
    let stream = gpu.context().default_stream();
    let mut build = |cu_seqlens: &[i64]| {
        let boundaries = Buffer::from_slice(&gpu, cu_seqlens).unwrap();
        let call = BuildCall::new(boundaries.pointer(), cu_seqlens.len(), Mask::Causal);
        // SAFETY: the boundaries live until the download, which waits.
        unsafe { schedule.build(&kernels, (&*stream).into(), &call).unwrap() };
        (schedule.download(), HostSchedule::new(&documents, &call))
    };
    let (built, wanted) = build(&wide);
    assert_eq!(built.unwrap(), wanted);
    // Its low half alone would be a sound boundary.
    let beyond = [0, (1 << 32) | 300, documents.total() as i64];
    let refused = build(&beyond).0.unwrap_err().to_string();
    let wanted = Documents::from_cu_seqlens(&beyond, documents.total()).unwrap_err();
    assert_eq!(refused, wanted.to_string());
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_graph_serves_every_row_of_its_length() {
    let bench = Bench::new();
    let gpu = &bench.gpu;
    let total = 40_000;
    let mut boundaries = Buffer::filled(gpu, total + 1, 0).unwrap();
    let mut schedule = DeviceSchedule::new(gpu, total).unwrap();
    let stream = gpu.context().new_stream().unwrap();
    let call = BuildCall::new(boundaries.pointer(), boundaries.len(), Mask::Causal);
    // SAFETY: buffers outlive the replays, each of which is waited for.
    let mut graph = unsafe {
        Graph::capture(gpu, (&*stream).into(), |stream| {
            schedule.build(&bench.kernels, stream, &call)
        })
    }
    .unwrap();

    let rows: [Vec<usize>; 5] = [
        vec![total],
        vec![1; total],
        vec![1000; 40],
        [vec![20_000], vec![0; 17], vec![1; 19_999], vec![1]].concat(),
        vec![12_345, 27_655],
    ];
    for lengths in rows.iter().chain(rows.iter().rev()) {
        let documents = Documents::from_lengths(lengths).unwrap();
        // The rest of the tensor: empty documents at the end.
        let mut padded = documents.cu_seqlens().to_vec();
        padded.resize(total + 1, total as i32);
        boundaries.upload(&padded).unwrap();
        graph.replay((&*stream).into()).unwrap();
        gpu.synchronize().unwrap();
        let built = schedule.download().unwrap();
        assert!(
            built == HostSchedule::new(&documents, &call),
            "{} documents",
            lengths.len()
        );
    }

    // A bad row in between is refused and leaves nothing behind.
    boundaries.upload(&[1]).unwrap();
    graph.replay((&*stream).into()).unwrap();
    let refused = schedule.download().unwrap_err().to_string();
    assert_eq!(refused, DocumentsError::Start { value: 1 }.to_string());
    boundaries.upload(&[0]).unwrap();
    graph.replay((&*stream).into()).unwrap();
    schedule.download().unwrap();
}

/// Boundaries that are sound, almost sound, or noise.
fn unsound() -> impl Strategy<Value = (Vec<i32>, usize)> {
    let noise = prop::collection::vec(any::<i32>(), 2..300);
    let near = prop::collection::vec(-3i32..600, 2..300);
    let one_off = (
        prop::collection::vec(0usize..300, 1..200),
        any::<prop::sample::Index>(),
        prop_oneof![Just(i32::MIN), Just(-1), Just(i32::MAX), -400i32..400],
    )
        .prop_map(|(lengths, index, change)| {
            let documents = Documents::from_lengths(&lengths).unwrap();
            let mut cu_seqlens = documents.cu_seqlens().to_vec();
            let entry = index.get_mut(&mut cu_seqlens);
            *entry = entry.saturating_add(change);
            cu_seqlens
        });
    (prop_oneof![noise, near, one_off], 0usize..40_000).prop_map(|(cu_seqlens, total)| {
        let last = cu_seqlens[cu_seqlens.len() - 1];
        // Half of the time the row ends where the boundaries do.
        let total = usize::try_from(last)
            .ok()
            .filter(|&last| last < 50_000 && total % 2 == 0)
            .unwrap_or(total);
        (cu_seqlens, total)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn pck_04_unsound_boundaries_are_refused_with_the_hosts_reason() {
    let bench = Bench::new();
    let refusals = std::cell::Cell::new(0);
    cases(600)
        .run(&(unsound(), masks()), |((cu_seqlens, total), mask)| {
            let wide: Vec<_> = cu_seqlens.iter().copied().map(i64::from).collect();
            let built = bench.build(&cu_seqlens, total, |pointer, entries| {
                BuildCall::new(pointer, entries, mask)
            });
            match (Documents::from_cu_seqlens(&wide, total), built) {
                (Ok(documents), Ok(built)) => {
                    let call = BuildCall::new(0, 0, mask);
                    prop_assert!(built == HostSchedule::new(&documents, &call));
                }
                (Err(wanted), Err(ScheduleError::Documents(found))) => {
                    prop_assert_eq!(found, wanted);
                    refusals.set(refusals.get() + 1);
                }
                (wanted, found) => prop_assert!(false, "{wanted:?} {found:?}"),
            }
            Ok(())
        })
        .unwrap();
    assert!(refusals.get() > 100, "{}", refusals.get());
}

#[test]
#[ignore = "needs a GPU"]
fn shapes_that_no_row_has_are_refused_before_a_launch() {
    let bench = Bench::new();
    let refusal = |cu_seqlens: &[i32], rows, section| {
        let built = bench.build(cu_seqlens, 0, |pointer, entries| BuildCall {
            item_rows: [rows, 128],
            section_rows: [usize::MAX, section],
            ..BuildCall::new(pointer, entries, Mask::Causal)
        });
        built.unwrap_err().to_string()
    };
    assert!(refusal(&[0], 256, 1).contains("cu_seqlens has length 1"));
    assert!(refusal(&[0, 0], 0, 1).contains("a work item of 0 rows"));
    assert!(refusal(&[0, 0], 1, 0).contains("a section of 0 rows"));
    let too_long = DeviceSchedule::new(&bench.gpu, 1 << 31).err().unwrap();
    assert!(
        too_long.to_string().contains("longer than 32-bit"),
        "{too_long}"
    );
}

#[test]
#[ignore = "needs a GPU"]
fn ctas_visit_every_item_and_head_once() {
    let bench = Bench::new();
    let gpu = &bench.gpu;
    let module = gpu.compile(&WALK, &schedule_defines()).unwrap();
    let [walk, locate] = ["walk", "locate"].map(|name| module.kernel(name).unwrap());
    let stream = gpu.context().default_stream();
    let documents = Documents::from_lengths(&[5000, 0, 1, 900, 257, 3000]).unwrap();
    let boundaries = Buffer::from_slice(gpu, documents.cu_seqlens()).unwrap();
    let call = BuildCall::new(boundaries.pointer(), boundaries.len(), Mask::Causal);
    let mut schedule = DeviceSchedule::new(gpu, documents.total()).unwrap();
    // SAFETY: the boundaries live until the summary, which waits.
    unsafe {
        schedule
            .build(&bench.kernels, (&*stream).into(), &call)
            .unwrap()
    };
    let summary = schedule.summary().unwrap();
    for (heads, per_section) in [(1, 1), (16, 2), (16, 16), (7, 3), (5, 4)] {
        let order = HeadSections::new(
            NonZero::new(heads).unwrap(),
            NonZero::new(per_section).unwrap(),
        );
        let sections = [heads as u32, per_section as u32];
        for (index, pass, items) in [
            (0u32, Pass::Forward, summary.forward_items),
            (1, Pass::Backward, summary.backward_items),
        ] {
            for (dynamic, grid) in [
                (0, 1),
                (0, 132),
                (0, 1000),
                (1, 1),
                (1, 132),
                (1, 1000),
                (1, 132),
            ] {
                let visits = Buffer::<u32>::filled(gpu, items * heads, 0).unwrap();
                let arguments = (
                    schedule.pointer() + schedule.layout().header as u64,
                    index,
                    dynamic,
                    sections,
                    schedule.pointer() + ScheduleHeader::counter_offset(pass) as u64,
                    visits.pointer(),
                );
                // SAFETY: the buffers live until the download, which waits.
                unsafe {
                    walk.launch((&*stream).into(), Launch::linear(grid, 32), arguments)
                        .unwrap()
                };
                let visits = visits.download().unwrap();
                assert!(
                    visits.iter().all(|&count| count == 1),
                    "{heads} {per_section} {dynamic} {grid}"
                );
            }

            let positions = order.positions(items);
            let found = Buffer::<[u32; 2]>::filled(gpu, positions, 0xff).unwrap();
            let arguments = (items as u32, sections, found.pointer());
            let launch = Launch::linear((positions as u32).div_ceil(128), 128);
            // SAFETY: the buffer lives until the download, which waits.
            unsafe { locate.launch((&*stream).into(), launch, arguments).unwrap() };
            let wanted: Vec<_> = (0..positions)
                .map(|position| order.at(position, items).unwrap())
                .map(|(item, head)| [item as u32, head as u32])
                .collect();
            assert_eq!(first_difference(&found.download().unwrap(), &wanted), None);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_acquire_as_the_rule_says() {
    let bench = Bench::new();
    let gpu = &bench.gpu;
    let module = gpu.compile(&WALK, &schedule_defines()).unwrap();
    let kernel = module.kernel("acquisition").unwrap();
    let stream = gpu.context().default_stream();
    for lengths in [&[300, 300][..], &[900, 100, 100, 100], &[901, 1, 1, 1]] {
        for mask in [Mask::Causal, Mask::Full, Mask::window(7)] {
            let documents = Documents::from_lengths(lengths).unwrap();
            let boundaries = Buffer::from_slice(gpu, documents.cu_seqlens()).unwrap();
            let call = BuildCall::new(boundaries.pointer(), boundaries.len(), mask);
            let mut schedule = DeviceSchedule::new(gpu, documents.total()).unwrap();
            for (heads, per_section) in [(4, 4), (4, 2), (1, 1)] {
                let order = HeadSections::new(
                    NonZero::new(heads).unwrap(),
                    NonZero::new(per_section).unwrap(),
                );
                let found = Buffer::<u32>::filled(gpu, 1, 0xff).unwrap();
                let arguments = (
                    schedule.pointer() + schedule.layout().header as u64,
                    [heads as u32, per_section as u32],
                    found.pointer(),
                );
                // SAFETY: the buffers live until the download, which waits.
                unsafe {
                    schedule
                        .build(&bench.kernels, (&*stream).into(), &call)
                        .unwrap();
                    kernel
                        .launch((&*stream).into(), Launch::linear(1, 1), arguments)
                        .unwrap();
                }
                let wanted = order.acquisition(Acquisition::choose(mask, &documents));
                let wanted = u32::from(wanted == Acquisition::Dynamic);
                assert_eq!(found.download().unwrap(), [wanted], "{lengths:?} {mask}");
            }
        }
    }
}
