//! Compilation and its cache. NVRTC has to be there, a GPU has not.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::{SCALE, factor};
use flamia_cuda::{
    Arch, CompileError, Compiler, Cubin, Header, KernelResources, Program, ResourceError, Source,
};

/// A compiler with this cache. A machine without NVRTC fails the tests, and its error says what to
/// do.
fn compiler(cache: &Path) -> Compiler {
    match Compiler::load() {
        Ok(compiler) => compiler.with_cache(cache),
        Err(error) => panic!("{error}"),
    }
}

fn scale<'a>(factor: &'a [(&'a str, String)]) -> Program<'a> {
    Program {
        source: &SCALE,
        defines: factor,
        arch: Arch::Sm90a,
    }
}

const fn source(text: &'static str) -> Source {
    Source {
        name: "tests/k.cu",
        text,
        headers: &[],
    }
}

/// Compiles from nothing.
fn compile(source: &Source, arch: Arch) -> Result<Arc<Cubin>, CompileError> {
    let folder = tempfile::tempdir().unwrap();
    compiler(folder.path()).compile(&Program {
        source,
        defines: &[],
        arch,
    })
}

fn log_of(error: CompileError) -> String {
    assert!(matches!(error, CompileError::Rejected { .. }), "{error:?}");
    error.to_string()
}

/// The architecture that a cubin's ELF header names: bits 8 to 15 of its flags hold its number.
fn chip(cubin: &Cubin) -> u8 {
    assert_eq!(&cubin.image()[..4], b"\x7fELF");
    cubin.image()[49]
}

#[test]
fn a_kernel_compiles_for_hopper_and_blackwell() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = compiler(folder.path());
    for (arch, number) in [(Arch::Sm90a, 90), (Arch::Sm100a, 100), (Arch::Sm103a, 103)] {
        let defines = factor(3);
        let program = Program {
            source: &SCALE,
            defines: &defines,
            arch,
        };
        let cubin = compiler.compile(&program).unwrap();
        assert_eq!((cubin.arch, chip(&cubin)), (arch, number));
        assert_eq!(cubin.warnings, [""; 0]);
        let [kernel] = &cubin.kernels[..] else {
            panic!("{:?}", cubin.kernels)
        };
        assert_eq!(kernel.name, "scale");
        assert!((1..=255).contains(&kernel.registers), "{kernel}");
        assert_eq!(cubin.refuse_spills(), Ok(()));
    }
}

#[test]
fn every_architecture_is_one_that_nvrtc_knows() {
    let empty = source("extern \"C\" __global__ void k() {}");
    for arch in Arch::ALL {
        compile(&empty, arch).unwrap();
    }
}

#[test]
fn instructions_of_one_chip_are_its_own() {
    let sets_registers = source(
        "extern \"C\" __global__ void __launch_bounds__(384, 1) k(float *x) {
    x[0] = 1;
    asm volatile(\"setmaxnreg.inc.sync.aligned.u32 160;\");
}",
    );
    compile(&sets_registers, Arch::Sm90a).unwrap();
    let error = log_of(compile(&sets_registers, Arch::Sm90).unwrap_err());
    // The assembler's message names a line of PTX; the one it means follows, with its source.
    let mut lines = error
        .lines()
        .skip_while(|line| !line.contains("'setmaxnreg.inc'"));
    assert!(lines.next().unwrap().contains("not supported"), "{error}");
    assert_eq!(lines.next(), Some("  from tests/k.cu(3):"), "{error}");
    assert_eq!(
        lines.next(),
        Some("  setmaxnreg.inc.sync.aligned.u32 160;"),
        "{error}"
    );
}

#[test]
fn an_error_quotes_the_line_and_names_the_options() {
    const BROKEN: Header = Header {
        name: "broken.cuh",
        text: "#pragma once\n__device__ float two() { return zwei; }\n",
    };
    let broken = Source {
        name: "tests/broken.cu",
        text: "#include \"broken.cuh\"\n\nextern \"C\" __global__ void k(float *x) { x[0] = two() }\n",
        headers: &[BROKEN],
    };
    let error = log_of(compile(&broken, Arch::Sm100a).unwrap_err());
    for part in [
        "tests/broken.cu does not compile for sm_100a with NVRTC 1",
        "broken.cuh(2): error: identifier \"zwei\" is undefined\n  __device__ float two() { return zwei; }",
        "tests/broken.cu(3): error: expected a \";\"\n  extern \"C\" __global__ void k(float *x) { x[0] = two() }",
        "--gpu-architecture=sm_100a",
        "--std=c++17",
    ] {
        assert!(error.contains(part), "{part}\nin\n{error}");
    }
    let absent = source("#include \"absent.cuh\"\n");
    let error = log_of(compile(&absent, Arch::Sm90a).unwrap_err());
    assert!(error.contains("#include \"absent.cuh\""), "{error}");
}

#[test]
fn what_the_compiler_would_misread_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = compiler(folder.path());
    for (name, value) in [
        ("A B", "1"),
        ("", "1"),
        ("1A", "1"),
        ("F(x)", "x"),
        ("A", "1\n2"),
        ("A", "\0"),
    ] {
        let defines = [(name, value.to_owned())];
        let error = compiler.compile(&scale(&defines)).unwrap_err();
        assert!(
            matches!(error, CompileError::Define { .. }),
            "{name:?}: {error}"
        );
    }
    let cut = source("extern \"C\" __global__ void k() {}\0");
    let error = compile(&cut, Arch::Sm90a).unwrap_err();
    assert!(
        matches!(error, CompileError::Nul { position: 33, .. }),
        "{error:?}"
    );
}

#[test]
fn headers_include_one_another() {
    const INNER: Header = Header {
        name: "inner.cuh",
        text: "#pragma once\n#define TWO 2\n",
    };
    const OUTER: Header = Header {
        name: "folder/outer.cuh",
        text: "#include \"inner.cuh\"\n",
    };
    let nested = Source {
        name: "tests/nested.cu",
        text: "#include \"folder/outer.cuh\"\nextern \"C\" __global__ void k(float *x) { x[0] = TWO; }",
        headers: &[INNER, OUTER],
    };
    compile(&nested, Arch::Sm90a).unwrap();
}

#[test]
fn spills_are_reported_and_refused() {
    // 128 values live at once, in 32 registers.
    let spilling = source(
        "extern \"C\" __global__ void __launch_bounds__(1024, 2) crowded(float *x) {
    __shared__ float tile[64];
    float a[128];
    for (int i = 0; i < 128; i++) a[i] = x[i * threadIdx.x];
    tile[threadIdx.x % 64] = a[0];
    __syncthreads();
    for (int i = 0; i < 128; i++) x[i] = a[i] * a[127 - i] + tile[i % 64];
}
extern \"C\" __global__ void roomy(float *x) { x[0] = 1; }",
    );
    let cubin = compile(&spilling, Arch::Sm90a).unwrap();
    let [crowded, roomy] = &cubin.kernels[..] else {
        panic!("{:?}", cubin.kernels)
    };
    let KernelResources {
        name,
        registers,
        spill_stores,
        spill_loads,
        stack,
        shared,
        barriers,
    } = crowded;
    assert_eq!(
        (name.as_str(), *registers, *shared, *barriers),
        ("crowded", 32, 256, 1)
    );
    assert!(
        *spill_stores > 100 && *spill_loads > 100 && *stack > 100,
        "{crowded}"
    );
    assert_eq!(
        (roomy.name.as_str(), roomy.spill_stores, roomy.stack),
        ("roomy", 0, 0)
    );
    let error = cubin.refuse_spills().unwrap_err();
    let ResourceError::Spills { functions, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(functions, std::slice::from_ref(crowded));
    assert!(
        error
            .to_string()
            .contains(&format!("{spill_stores} + {spill_loads} bytes")),
        "{error}"
    );
}

#[test]
fn serialised_wgmma_is_refused_with_its_source_line() {
    // With TOUCH, the accumulators are used between two instructions that are in flight.
    let multiply = source(
        r#"__device__ void multiply(float (&d)[4], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
extern "C" __global__ void __launch_bounds__(128)
k(float *x, unsigned long long a, unsigned long long b) {
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;");
    multiply(d, a, b);
#if TOUCH
    d[0] += x[0];
#endif
    multiply(d, a, b);
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = d[i];
}"#,
    );
    let folder = tempfile::tempdir().unwrap();
    let compiler = compiler(folder.path());
    let refused = |touch: &str| {
        let defines = [("TOUCH", touch.to_owned())];
        let program = Program {
            source: &multiply,
            defines: &defines,
            arch: Arch::Sm90a,
        };
        compiler.compile(&program).unwrap().refuse_spills()
    };
    assert_eq!(refused("0"), Ok(()));
    let error = refused("1").unwrap_err();
    let ResourceError::Serialised { remarks, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        remarks.iter().any(|remark| remark.contains("serialized")),
        "{error}"
    );
    assert!(
        error.to_string().contains("  from tests/k.cu(12):"),
        "{error}"
    );
}

#[test]
fn warnings_are_kept_through_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let warned = source("extern \"C\" __global__ void k() { int unused; }");
    let program = Program {
        source: &warned,
        defines: &[],
        arch: Arch::Sm90a,
    };
    let compiled = compiler(folder.path()).compile(&program).unwrap();
    let [warning] = &compiled.warnings[..] else {
        panic!("{:?}", compiled.warnings)
    };
    assert!(
        warning.starts_with("tests/k.cu(1): warning") && warning.contains("int unused;"),
        "{warning}"
    );
    let second = compiler(folder.path());
    assert_eq!(
        second.compile(&program).unwrap().warnings,
        compiled.warnings
    );
    assert_eq!(second.compilations(), 0);
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    files
        .filter(|file| {
            file.extension()
                .is_some_and(|extension| extension == "cubin")
        })
        .collect()
}

#[test]
fn a_program_is_compiled_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = compiler(folder.path());
    let compiled = first.compile(&scale(&factor(3))).unwrap();
    assert!(Arc::ptr_eq(
        &first.compile(&scale(&factor(3))).unwrap(),
        &compiled
    ));
    assert_eq!(first.compilations(), 1);

    let second = compiler(folder.path());
    let cached = second.compile(&scale(&factor(3))).unwrap();
    assert_eq!(second.compilations(), 0);
    assert!(cached.image() == compiled.image());
    assert_eq!(cached.kernels, compiled.kernels);

    let other = second.compile(&scale(&factor(5))).unwrap();
    assert_eq!(second.compilations(), 1);
    assert!(other.image() != compiled.image());
    assert_eq!(entries(folder.path()).len(), 2);
}

#[test]
fn a_damaged_entry_is_compiled_anew() {
    let folder = tempfile::tempdir().unwrap();
    let compiled = compiler(folder.path()).compile(&scale(&factor(3))).unwrap();
    let [entry] = &entries(folder.path())[..] else {
        panic!("not one entry")
    };
    let whole = fs::read(entry).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for damaged in [&whole[..whole.len() / 2], &[], &flipped] {
        fs::write(entry, damaged).unwrap();
        for compilations in [1, 0] {
            let compiler = compiler(folder.path());
            let cubin = compiler.compile(&scale(&factor(3))).unwrap();
            assert!(cubin.image() == compiled.image());
            assert_eq!(compiler.compilations(), compilations);
        }
    }
}

#[test]
fn a_cache_that_cannot_be_written_fails_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // Not a folder, for whoever runs the test.
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let compiler = compiler(&file.join("kernels"));
    compiler.compile(&scale(&factor(3))).unwrap();
    compiler.compile(&scale(&factor(3))).unwrap();
    assert_eq!(compiler.compilations(), 1);
}

#[test]
fn an_error_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = compiler(folder.path());
    let broken = source("extern \"C\" __global__ void k() { broken }");
    let program = Program {
        source: &broken,
        defines: &[],
        arch: Arch::Sm90a,
    };
    for count in 1..=2 {
        assert!(compiler.compile(&program).is_err());
        assert_eq!(compiler.compilations(), count);
    }
    assert!(entries(folder.path()).is_empty());
}

#[test]
fn threads_compile_a_program_once() {
    let folder = tempfile::tempdir().unwrap();
    let compiler = compiler(folder.path());
    let compiled = std::thread::scope(|scope| {
        let threads = (0..8).map(|_| scope.spawn(|| compiler.compile(&scale(&factor(3))).unwrap()));
        let threads: Vec<_> = threads.collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert_eq!(compiler.compilations(), 1);
    assert!(
        compiled
            .iter()
            .all(|cubin| Arc::ptr_eq(cubin, &compiled[0]))
    );
}

#[test]
fn processes_compile_a_program_once() {
    const CACHE: &str = "FLAMIA_TEST_CACHE_OF_PARENT";
    const FACTORS: [u32; 3] = [3, 5, 7];
    if let Some(folder) = std::env::var_os(CACHE) {
        // One of the processes: says what it compiled, and what came of it.
        let compiler = compiler(Path::new(&folder));
        for value in FACTORS {
            let cubin = compiler.compile(&scale(&factor(value))).unwrap();
            println!(
                "\nimage {value} {} {:?}",
                cubin.image().len(),
                &cubin.image()[cubin.image().len() / 2..]
            );
        }
        println!("\ncompiled {}", compiler.compilations());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes_compile_a_program_once", "--nocapture"])
            .env(CACHE, folder.path())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let processes: Vec<_> = (0..6).map(|_| start()).collect();
    let mut images = Vec::new();
    let mut compiled = 0;
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success());
        let said = String::from_utf8(output.stdout).unwrap();
        images.extend(
            said.lines()
                .filter(|line| line.starts_with("image "))
                .map(str::to_owned),
        );
        let counts = said
            .lines()
            .filter_map(|line| line.strip_prefix("compiled "));
        compiled += counts
            .map(|count| count.parse::<usize>().unwrap())
            .sum::<usize>();
    }
    assert_eq!(images.len(), 6 * FACTORS.len());
    images.sort();
    images.dedup();
    assert_eq!(images.len(), FACTORS.len());
    assert_eq!(compiled, FACTORS.len());
    assert_eq!(entries(folder.path()).len(), FACTORS.len());
}
