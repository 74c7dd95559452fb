//! What NVRTC's program log says: the front end's messages, then one report of ptxas a function.

use std::fmt;

/// What one function of a cubin takes, as ptxas reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelResources {
    /// The function's name in the cubin.
    pub name: String,
    /// Registers of one thread at the launch.
    pub registers: u32,
    /// Bytes that one thread spills to local memory.
    pub spill_stores: u32,
    /// Bytes that one thread loads back.
    pub spill_loads: u32,
    /// Bytes of one thread's stack frame: spills, and arrays that are indexed at run time.
    pub stack: u32,
    /// Bytes of static shared memory of one block.
    pub shared: u32,
    /// Named barriers of one block.
    pub barriers: u32,
}

impl fmt::Display for KernelResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} registers, {} + {} bytes spilled and loaded, {} bytes of stack, \
             {} bytes of static shared memory, {} barriers",
            self.name,
            self.registers,
            self.spill_stores,
            self.spill_loads,
            self.stack,
            self.shared,
            self.barriers
        )
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Kernels, by name.
    pub kernels: Vec<KernelResources>,
    /// Functions that kernels call and that were not inlined.
    pub functions: Vec<KernelResources>,
    /// The front end's and ptxas's warnings, each with the lines that belong to it.
    pub warnings: Vec<String>,
    /// ptxas's remarks C75xx on wgmma instructions that it had to serialise, or to put waits
    /// around, each with the lines of the source that were put under it.
    pub serialised: Vec<String>,
}

/// Reads a whole log.
pub(crate) fn parse(log: &str) -> Report {
    let mut report = Report::default();
    let mut warning = Vec::new();
    let mut ptxas = Ptxas::default();
    let mut in_remark = false;
    for line in log.lines().chain([""]) {
        if in_remark && line.starts_with("  ") {
            if let Some(remark) = report.serialised.last_mut() {
                *remark += &format!("\n{line}");
            }
            continue;
        }
        let of_ptxas = line.strip_prefix("ptxas");
        in_remark = of_ptxas.is_some_and(|message| message.contains("(C75"));
        if of_ptxas.is_some() || line.trim().is_empty() {
            if !warning.is_empty() {
                report.warnings.push(warning.join("\n"));
                warning.clear();
            }
        } else if !line.starts_with("Remark:") {
            warning.push(line);
        }
        if let Some(message) = of_ptxas {
            if in_remark {
                report.serialised.push(line.to_owned());
            } else if message.trim_start().starts_with("warning") {
                report.warnings.push(line.to_owned());
            } else if let Some((_, message)) = message.split_once([':', '.']) {
                ptxas.read(message.trim());
            }
        }
    }
    (report.kernels, report.functions) = ptxas
        .functions
        .into_iter()
        .partition(|f| ptxas.entries.contains(&f.name));
    report.kernels.sort_by(|a, b| a.name.cmp(&b.name));
    report
}

#[derive(Default)]
struct Ptxas {
    functions: Vec<KernelResources>,
    entries: Vec<String>,
    /// The function of the last `Function properties`.
    properties_of: String,
}

impl Ptxas {
    fn read(&mut self, message: &str) {
        if let Some(rest) = message.strip_prefix("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default();
            self.entries.push(name.to_owned());
            name.clone_into(&mut self.properties_of);
        } else if let Some(name) = message.strip_prefix("Function properties for ") {
            name.clone_into(&mut self.properties_of);
        } else if let Some(used) = message.strip_prefix("Used ") {
            // Said of the kernel, whichever functions it calls.
            let name = self.entries.last().cloned().unwrap_or_default();
            self.set(&name, used);
        } else if message.contains("bytes stack frame") {
            let name = self.properties_of.clone();
            self.set(&name, message);
        }
    }

    /// Takes the numbers of a list such as `Used 10 registers, used 1 barriers, 256 bytes smem`.
    fn set(&mut self, name: &str, list: &str) {
        let known = self
            .functions
            .iter()
            .position(|function| function.name == name);
        let index = known.unwrap_or_else(|| {
            self.functions.push(KernelResources {
                name: name.to_owned(),
                ..Default::default()
            });
            self.functions.len() - 1
        });
        let function = &mut self.functions[index];
        for item in list.split(',') {
            let item = item.trim().trim_start_matches("used ");
            let Some((number, what)) = item.split_once(' ') else {
                continue;
            };
            let field = match what {
                "registers" => &mut function.registers,
                "barriers" => &mut function.barriers,
                "bytes smem" => &mut function.shared,
                "bytes stack frame" => &mut function.stack,
                "bytes spill stores" => &mut function.spill_stores,
                "bytes spill loads" => &mut function.spill_loads,
                _ => continue,
            };
            *field = number.parse().unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVRTC 13.0 prints it, but for ptxas's warning and the lines under its remark.
    const LOG: &str = "\
k.cu(1): warning #177-D: variable \"u\" was declared but never referenced
  { int u; }
        ^

Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"

k.cu(1): warning #39-D: division by zero
  x[0] = N / 0;
             ^
          detected during instantiation of \"void k<N>(float *) [with N=3]\" at line 2

ptxas info    : (C7517) warpgroup.wait is injected in around line 47 by compiler
  from k.cu(7):
  mov.f32 a, b;
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'q' for 'sm_90a'
ptxas info    : Function properties for q
ptxas         .     560 bytes stack frame, 1296 bytes spill stores, 1292 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 560 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compile time = 2.473 ms
ptxas info    : Function properties for _Z1ff
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas warning : made up
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compile time = 84.758 ms
";

    #[test]
    fn a_log_gives_every_function_warning_and_remark() {
        let report = parse(LOG);
        let q = KernelResources {
            name: "q".into(),
            registers: 32,
            spill_stores: 1296,
            spill_loads: 1292,
            stack: 560,
            shared: 256,
            barriers: 1,
        };
        let a = KernelResources {
            name: "a".into(),
            registers: 168,
            barriers: 16,
            ..Default::default()
        };
        let f = KernelResources {
            name: "_Z1ff".into(),
            spill_stores: 4,
            spill_loads: 12,
            stack: 8,
            ..Default::default()
        };
        assert_eq!(report.kernels, [a, q]);
        assert_eq!(report.functions, [f]);
        assert_eq!(report.warnings.len(), 3, "{:?}", report.warnings);
        assert!(
            report.warnings[0].ends_with("        ^"),
            "{}",
            report.warnings[0]
        );
        assert!(report.warnings[1].contains("N / 0") && report.warnings[1].ends_with("line 2"));
        assert_eq!(report.warnings[2], "ptxas warning : made up");
        let [injected, serialised] = &report.serialised[..] else {
            panic!("{:?}", report.serialised);
        };
        assert!(injected.ends_with("compiler\n  from k.cu(7):\n  mov.f32 a, b;"));
        assert!(serialised.contains("(C7511)"), "{serialised}");
        assert_eq!(parse(""), Report::default());
    }
}
