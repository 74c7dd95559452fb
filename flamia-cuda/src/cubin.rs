//! A compiled program, and what its kernels take of the chip.

use crate::arch::Arch;
use crate::log::{self, KernelResources};

/// Machine code for one architecture, with what the compiler said of it.
#[derive(Clone, Debug)]
pub struct Cubin {
    /// The source's name.
    pub name: &'static str,
    /// What it runs on.
    pub arch: Arch,
    /// Every kernel, by name.
    pub kernels: Vec<KernelResources>,
    /// The compiler's warnings, each with the source lines it quotes.
    pub warnings: Vec<String>,
    /// Out of reach: the driver reads as far as its ELF header says.
    image: Vec<u8>,
    /// Functions that were not inlined.
    functions: Vec<KernelResources>,
    serialised: Vec<String>,
}

/// The compiler did with a kernel what costs it its speed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// Registers did not suffice.
    #[error("{name} for {arch} spills registers to local memory:{}", lines(.functions))]
    Spills {
        /// The source's name.
        name: &'static str,
        #[allow(missing_docs)]
        arch: Arch,
        /// The functions that spill.
        functions: Vec<KernelResources>,
    },
    /// wgmma instructions wait where the source does not say so.
    #[error(
        "{name} for {arch} has wgmma instructions that ptxas serialised or put waits around:{}",
        lines(.remarks)
    )]
    Serialised {
        /// The source's name.
        name: &'static str,
        #[allow(missing_docs)]
        arch: Arch,
        /// What ptxas says of them.
        remarks: Vec<String>,
    },
}

fn lines<T: ToString>(items: &[T]) -> String {
    let line = |item: &T| format!("\n  {}", item.to_string().replace('\n', "\n  "));
    items.iter().map(line).collect()
}

impl Cubin {
    pub(crate) fn new(name: &'static str, arch: Arch, image: Vec<u8>, log: &str) -> Self {
        let report = log::parse(log);
        Self {
            name,
            arch,
            image,
            kernels: report.kernels,
            warnings: report.warnings,
            functions: report.functions,
            serialised: report.serialised,
        }
    }

    /// The file that the driver loads.
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// An error if any function spills registers, or if ptxas remarked that it serialised wgmma
    /// instructions or put waits around them (C75xx). Both are correct and slow, and seen by nobody who does not ask.
    pub fn refuse_spills(&self) -> Result<(), ResourceError> {
        self.refuse_spills_over(0)
    }

    /// The same for functions that store or load more than `bytes` of registers.
    pub fn refuse_spills_over(&self, bytes: u32) -> Result<(), ResourceError> {
        let (name, arch) = (self.name, self.arch);
        let all = self.kernels.iter().chain(&self.functions);
        let functions: Vec<_> = all
            .filter(|function| function.spill_stores.max(function.spill_loads) > bytes)
            .cloned()
            .collect();
        if !functions.is_empty() {
            return Err(ResourceError::Spills {
                name,
                arch,
                functions,
            });
        }
        if !self.serialised.is_empty() {
            let remarks = self.serialised.clone();
            return Err(ResourceError::Serialised {
                name,
                arch,
                remarks,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cubin(log: &str) -> Cubin {
        Cubin::new("k.cu", Arch::Sm90a, Vec::new(), log)
    }

    #[test]
    fn spills_of_kernels_and_of_what_they_call_are_refused() {
        let clean = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
            ptxas info    : Function properties for k\n\
            ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 10 registers, used 0 barriers\n";
        assert_eq!(cubin(clean).refuse_spills(), Ok(()));
        let callee = "ptxas info    : Function properties for f\n\
            ptxas         .     8 bytes stack frame, 0 bytes spill stores, 12 bytes spill loads\n";
        let error = cubin(&format!("{clean}{callee}"))
            .refuse_spills()
            .unwrap_err();
        let shown = error.to_string();
        for part in ["k.cu", "sm_90a", "f: ", "12 bytes"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(!shown.contains("k: "), "{shown}");
    }

    #[test]
    fn serialised_wgmma_is_refused() {
        let remark = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions \
            are serialized due to insufficient register resources in function 'k'";
        let error = cubin(remark).refuse_spills().unwrap_err().to_string();
        assert!(
            error.contains("(C7515)") && error.contains("'k'"),
            "{error}"
        );
    }
}
