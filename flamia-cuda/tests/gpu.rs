//! Launches. `cargo test -- --ignored` on a machine that has a GPU, and NVRTC.

mod common;

use std::time::{Duration, Instant};

use common::{SCALE, factor};
use flamia_cuda::{
    Arch, Buffer, BuildError, Compiler, Gpu, GpuError, Graph, Kernel, Launch, Program, Source,
    Stream, Timer,
};

fn gpu() -> Gpu {
    Gpu::new(0).unwrap_or_else(|error| panic!("{error}"))
}

fn kernel(gpu: &Gpu, source: &Source, name: &str) -> Kernel {
    let module = gpu
        .compile(source, &[])
        .unwrap_or_else(|error| panic!("{error}"));
    module.kernel(name).unwrap()
}

/// `c[i] = a[i] * factor + b[i]`, told by a struct whose fields differ in size.
const ADD: Source = Source {
    name: "tests/add.cu",
    text: r#"
struct Params {
    const float *a, *b;
    float *c;
    unsigned n;
    float factor;
};
extern "C" __global__ void add(Params p, unsigned short offset) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.c[i] = p.a[i] * p.factor + p.b[i] + offset;
}
"#,
    headers: &[],
};

#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Params {
    a: u64,
    b: u64,
    c: u64,
    n: u32,
    factor: f32,
}

struct Add {
    kernel: Kernel,
    a: Buffer<f32>,
    b: Buffer<f32>,
    c: Buffer<f32>,
}

impl Add {
    const N: u32 = 1000;
    const OFFSET: u16 = 7;

    fn new(gpu: &Gpu) -> Self {
        let mut add = Self {
            kernel: kernel(gpu, &ADD, "add"),
            a: Buffer::filled(gpu, Self::N as usize, 0).unwrap(),
            b: Buffer::filled(gpu, Self::N as usize, 0).unwrap(),
            c: Buffer::filled(gpu, Self::N as usize, 0xff).unwrap(),
        };
        add.set(1.0);
        add
    }

    fn set(&mut self, step: f32) {
        let values = |scale: f32| (0..Self::N).map(|i| i as f32 * scale).collect::<Vec<_>>();
        self.a.upload(&values(step)).unwrap();
        self.b.upload(&values(-0.5)).unwrap();
    }

    fn launch(&self, stream: Stream) -> Result<(), GpuError> {
        let params = Params {
            a: self.a.pointer(),
            b: self.b.pointer(),
            c: self.c.pointer(),
            n: Self::N,
            factor: 3.0,
        };
        let launch = Launch::linear(Self::N.div_ceil(128), 128);
        // SAFETY: the kernel's own arguments; the buffers are alive until they are read back.
        unsafe { self.kernel.launch(stream, launch, (params, Self::OFFSET)) }
    }

    fn check(&self, step: f32) {
        let expected: Vec<_> = (0..Self::N)
            .map(|i| i as f32 * step * 3.0 - i as f32 * 0.5 + f32::from(Self::OFFSET))
            .collect();
        assert_eq!(self.c.download().unwrap(), expected);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error() {
    let error = Gpu::new(usize::MAX).unwrap_err();
    let is_known = matches!(
        error,
        GpuError::NoDriver
            | GpuError::DriverTooOld { .. }
            | GpuError::DriverUnusable { .. }
            | GpuError::NoGpu
            | GpuError::NoSuchGpu { .. }
    );
    assert!(is_known, "{error:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_says_what_it_is() {
    let gpu = gpu();
    assert!(gpu.arch().runs_on(gpu.arch()));
    assert!(!gpu.name().is_empty() && gpu.driver().major >= 13);
    assert!(gpu.multiprocessors() > 0 && gpu.l2_bytes() > 1 << 19);
    assert!(gpu.shared_bytes() > 48 << 10);
}

#[test]
#[ignore = "needs a GPU"]
fn a_struct_is_passed_on_any_stream() {
    let gpu = gpu();
    let second = gpu.context().new_stream().unwrap();
    let default = gpu.context().default_stream();
    // SAFETY: the legacy default stream is always there.
    let legacy = unsafe { Stream::from_raw(std::ptr::null_mut()) };
    for stream in [(&*second).into(), (&*default).into(), legacy] {
        let add = Add::new(&gpu);
        add.launch(stream).unwrap();
        add.check(1.0);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn any_thread_launches_and_keeps_its_context() {
    let gpu = gpu();
    let add = Add::new(&gpu);
    let stream = gpu.context().new_stream().unwrap();
    let current = || cudarc::driver::result::ctx::get_current().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(current(), None);
            add.launch((&*stream).into()).unwrap();
            assert_eq!(current(), None);
        });
    });
    add.check(1.0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_replays_what_was_captured() {
    let gpu = gpu();
    let mut add = Add::new(&gpu);
    let stream = gpu.context().new_stream().unwrap();
    let stream = Stream::from(&*stream);
    // SAFETY: the kernel and the buffers outlive the graph.
    let mut graph = unsafe { Graph::capture(&gpu, stream, |stream| add.launch(stream)) }.unwrap();
    gpu.synchronize().unwrap();
    assert!(add.c.download().unwrap().iter().all(|value| value.is_nan()));
    for step in [1.0, 2.0] {
        add.set(step);
        graph.replay(stream).unwrap();
        add.check(step);
    }

    let other = gpu.context().new_stream().unwrap();
    add.set(3.0);
    graph.replay((&*other).into()).unwrap();
    add.check(3.0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_failed_capture_leaves_the_stream_as_it_was() {
    let gpu = gpu();
    let add = Add::new(&gpu);
    let stream = gpu.context().new_stream().unwrap();
    let stream = Stream::from(&*stream);
    let fail = |stream: Stream| {
        add.launch(stream)?;
        Err(GpuError::NoGpu)
    };
    // SAFETY: nothing is replayed.
    let failed = unsafe { Graph::capture(&gpu, stream, fail) };
    assert_eq!(failed.err(), Some(GpuError::NoGpu));
    add.launch(stream).unwrap();
    add.check(1.0);
}

#[test]
#[ignore = "needs a GPU"]
fn dynamic_shared_memory_beyond_48_kib_is_asked_for() {
    // Each thread's value travels through the far end of the shared memory.
    const REVERSE: Source = Source {
        name: "tests/reverse.cu",
        text: r#"
extern "C" __global__ void reverse(unsigned *x, unsigned words) {
    extern __shared__ unsigned tile[];
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) tile[words - 1 - i] = x[i];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) x[i] = tile[i];
}
"#,
        headers: &[],
    };
    let gpu = gpu();
    let reverse = kernel(&gpu, &REVERSE, "reverse");
    let words = gpu.shared_bytes() / 4;
    let x = Buffer::from_slice(&gpu, &(0..words).collect::<Vec<_>>()).unwrap();
    let stream = gpu.context().new_stream().unwrap();
    let launch = || {
        let launch = Launch::linear(1, 256).with_shared(words * 4);
        // SAFETY: the kernel's own arguments; `x` has these words, and is read back.
        unsafe { reverse.launch((&*stream).into(), launch, (x.pointer(), words)) }
    };
    let error = launch().unwrap_err();
    assert!(error.to_string().contains("set_shared_limit"), "{error}");
    let error = reverse
        .set_shared_limit(gpu.shared_bytes() + 1)
        .unwrap_err();
    assert!(error.to_string().contains("of this GPU"), "{error}");
    reverse.set_shared_limit(words * 4).unwrap();
    launch().unwrap();
    assert_eq!(x.download().unwrap(), (0..words).rev().collect::<Vec<_>>());
}

#[test]
#[ignore = "needs a GPU"]
fn wrong_arguments_names_and_architectures_are_refused() {
    let gpu = gpu();
    let module = gpu.compile(&SCALE, &factor(3)).unwrap();
    let error = module.kernel("skale").unwrap_err();
    assert!(
        error.to_string().contains("\"skale\"; it has scale"),
        "{error}"
    );

    let scale = module.kernel("scale").unwrap();
    let stream = gpu.context().default_stream();
    let stream = Stream::from(&*stream);
    let launch = Launch::linear(1, 1);
    // SAFETY: nothing is launched.
    let errors = unsafe {
        [
            scale.launch(stream, launch, (0_u64,)),
            scale.launch(stream, launch, (0_u64, 0_u64)),
            scale.launch(stream, launch, (0_u64, 0_u32, 0_u32)),
        ]
    };
    for error in errors {
        let error = error.unwrap_err();
        assert!(matches!(error, GpuError::Arguments { .. }), "{error:?}");
        assert!(
            error.to_string().contains("2 parameters of [8, 4] bytes"),
            "{error}"
        );
    }
    // SAFETY: as above: no block can have so many threads.
    let error = unsafe { scale.launch(stream, Launch::linear(1, 4096), (0_u64, 0_u32)) };
    let error = error.unwrap_err();
    assert!(matches!(error, GpuError::Launch { .. }), "{error:?}");

    let other = if gpu.arch() == Arch::Sm120 {
        Arch::Sm90a
    } else {
        Arch::Sm120
    };
    let defines = factor(3);
    let program = Program {
        source: &SCALE,
        defines: &defines,
        arch: other,
    };
    let cubin = Compiler::shared().unwrap().compile(&program).unwrap();
    let error = gpu.load(&cubin).unwrap_err();
    assert!(matches!(error, GpuError::WrongArch { .. }), "{error:?}");

    let broken = Source {
        name: "tests/broken.cu",
        text: "broken",
        headers: &[],
    };
    let error = gpu.compile(&broken, &[]).unwrap_err();
    assert!(matches!(error, BuildError::Compile(_)), "{error:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn a_launch_waits_for_nothing_and_a_timer_sees_the_work() {
    const SPIN: Source = Source {
        name: "tests/spin.cu",
        text: r#"
__device__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start = now();
    while (now() - start < nanoseconds) {}
}
"#,
        headers: &[],
    };
    const LAUNCHES: u32 = 10;
    const EACH: Duration = Duration::from_millis(20);
    let gpu = gpu();
    let spin = kernel(&gpu, &SPIN, "spin");
    let stream = gpu.context().new_stream().unwrap();
    let stream = Stream::from(&*stream);
    let nanoseconds = EACH.as_nanos() as u64;
    // SAFETY: the kernel's own argument, and it touches no memory.
    let launch = || unsafe { spin.launch(stream, Launch::linear(1, 1), (nanoseconds,)) };
    launch().unwrap();
    gpu.synchronize().unwrap();

    let mut launched = Duration::MAX;
    let start = Instant::now();
    let mut timer = Timer::new(&gpu).unwrap();
    let microseconds = timer.time(stream, |_| {
        for _ in 0..LAUNCHES {
            launch()?;
        }
        launched = start.elapsed();
        Ok::<_, GpuError>(())
    });
    let all = EACH * LAUNCHES;
    assert!(launched < all / 2, "{launched:?}");
    assert!(start.elapsed() >= all);
    let microseconds = microseconds.unwrap();
    let expected = all.as_secs_f64() * 1e6;
    assert!(
        (expected..expected * 1.5).contains(&microseconds),
        "{microseconds}"
    );
}
