//! Every kernel compiles without a GPU, and none spills. NVRTC has to be there.

mod compiled;

use flamia_cuda::{Arch, Compiler, Program};
use flamia_kernels::Mask;
use flamia_kernels::cuda::forward::{self, ForwardConfig, ItemRows};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{self, Forms, Quantisation};
use flamia_kernels::cuda::retile::{self, Retiling};

#[test]
fn quantisers_do_not_spill() {
    for quantisation in Quantisation::all() {
        let what = format!("{quantisation:?}");
        compiled::without_spills(&quantise::SOURCE, &quantisation.defines(), &what);
    }
}

#[test]
fn retilers_do_not_spill() {
    for retiling in Retiling::all() {
        let what = format!("{retiling:?}");
        compiled::without_spills(&retile::SOURCE, &retiling.defines(), &what);
    }
}

/// A struct that the host fills cannot drift from the kernel's: every field that the host names is one
/// that the kernel compares.
#[test]
fn a_parameter_that_moved_does_not_compile() {
    let quantisation = Quantisation {
        head_dim: HeadDim::D128,
        hadamard: false,
        forms: Forms::Both,
    };
    let forward = ForwardConfig {
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
        item_rows: ItemRows::R192,
    };
    let compiler = Compiler::shared().unwrap_or_else(|error| panic!("{error}"));
    for (source, sound) in [
        (&quantise::SOURCE, quantisation.defines()),
        (&forward::SOURCE, forward.defines()),
    ] {
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
            let program = Program {
                source,
                defines: &defines,
                arch: Arch::Sm90a,
            };
            let error = compiler.compile(&program).unwrap_err().to_string();
            let place = field.replacen('_', "::", 1);
            assert!(error.contains(&place), "{place}: {error}");
            compared += 1;
        }
        assert!(compared > 15, "{}: {compared}", source.name);
    }
}
