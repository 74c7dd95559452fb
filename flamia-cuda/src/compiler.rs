//! Compilation with NVRTC, each program once: in this process, and on this machine.

use std::collections::HashMap;
use std::env;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::arch::Arch;
use crate::cache::{Cache, Entry};
use crate::cubin::Cubin;
use crate::ffi::nvrtc::{Image, Nvrtc, Outcome, Status};
use crate::find::{Found, NvrtcError, find};
use crate::ptx;
use crate::source::{Key, Program};
use crate::version::Version;

/// NVRTC, with the cache of what it compiled.
///
/// Cubins are kept in the folder `FLAMIA_KERNEL_CACHE`, else in `flamia/kernels` of the user's cache
/// folder, by a hash of everything they depend on; the folder may be removed at any time. Several
/// processes and threads may compile at once: what is the same is compiled by one of them.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: Nvrtc,
    version: Version,
    library: PathBuf,
    cache: Cache,
    memo: Mutex<HashMap<Key, Slot>>,
    compilations: AtomicU64,
}

/// Held while its cubin is made, so that other threads that ask for the same wait for it.
type Slot = Arc<Mutex<Option<Arc<Cubin>>>>;

/// A program that was not compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// NVRTC found errors in it.
    #[error(
        "{name} does not compile for {arch} with NVRTC {nvrtc}:\n{}\n  options: {}",
        .log.trim_end(), .options.join(" ")
    )]
    Rejected {
        /// The source's name.
        name: &'static str,
        #[allow(missing_docs)]
        arch: Arch,
        /// NVRTC's version.
        nvrtc: Version,
        /// The options that it was given.
        options: Vec<String>,
        /// What it said, with the lines of the source that it speaks of.
        log: String,
    },
    /// A macro that the compiler would take for something else.
    #[error(
        "{name} cannot be compiled with the macro {macro_name:?} defined as {value:?}: macros are \
         named by identifiers, and their values are of one line"
    )]
    Define {
        /// The source's name.
        name: &'static str,
        /// The macro's name.
        macro_name: String,
        /// The macro's value.
        value: String,
    },
    /// The C interface would end the text there.
    #[error("the text of {name} holds a NUL byte at {position}")]
    Nul {
        /// The name of the source or header.
        name: &'static str,
        /// Bytes from the text's start.
        position: usize,
    },
    /// NVRTC itself failed.
    #[error(
        "NVRTC {nvrtc} ({}) failed on {name} with {status}{}\n{log}",
        .library.display(), hint(*.code, *.nvrtc)
    )]
    Nvrtc {
        /// The source's name.
        name: &'static str,
        /// The library.
        library: PathBuf,
        /// Its version.
        nvrtc: Version,
        /// NVRTC's code of the failure.
        code: i32,
        /// NVRTC's name of the failure.
        status: String,
        /// What it said besides.
        log: String,
    },
}

fn hint(code: i32, nvrtc: Version) -> String {
    match code {
        Status::BUILTIN_OPERATION => format!(
            "; it needs libnvrtc-builtins.so.{nvrtc} of the same package, in the same folder"
        ),
        _ => String::new(),
    }
}

impl Compiler {
    /// Opens NVRTC 13.0 or newer: the library or folder that the environment variable
    /// `FLAMIA_NVRTC` names; else what the loader finds, what lies beside a torch that is loaded,
    /// and the CUDA toolkit (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`).
    pub fn load() -> Result<Self, NvrtcError> {
        let Found {
            nvrtc,
            version,
            library,
        } = find()?;
        Ok(Self {
            nvrtc,
            version,
            library,
            cache: Cache::at(Cache::folder(|name| env::var_os(name))),
            memo: Mutex::default(),
            compilations: AtomicU64::new(0),
        })
    }

    /// The compiler of this process, opened on the first call that succeeds.
    pub fn shared() -> Result<&'static Self, NvrtcError> {
        static SHARED: OnceLock<Compiler> = OnceLock::new();
        match SHARED.get() {
            Some(shared) => Ok(shared),
            None => {
                let loaded = Self::load()?;
                Ok(SHARED.get_or_init(|| loaded))
            }
        }
    }

    /// The same compiler, which keeps its cubins in this folder.
    #[must_use]
    pub fn with_cache(self, folder: impl Into<PathBuf>) -> Self {
        Self {
            cache: Cache::at(Some(folder.into())),
            ..self
        }
    }

    /// NVRTC's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// NVRTC's library.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// How many programs were compiled here. The others came from the cache.
    pub fn compilations(&self) -> u64 {
        self.compilations.load(Ordering::Relaxed)
    }

    /// The program's cubin, compiled unless it was before.
    pub fn compile(&self, program: &Program<'_>) -> Result<Arc<Cubin>, CompileError> {
        let key = program.key(self.version);
        let slot = Arc::clone(lock(&self.memo).entry(key).or_default());
        let mut slot = lock(&slot);
        if let Some(cubin) = &*slot {
            return Ok(Arc::clone(cubin));
        }
        let entry = match self.cache.read(&key) {
            Some(entry) => entry,
            None => self.compile_once(program, &key)?,
        };
        let cubin = Cubin::new(program.source.name, program.arch, entry.image, &entry.log);
        Ok(Arc::clone(slot.insert(Arc::new(cubin))))
    }

    /// Compiles into the cache, unless another process did so while we waited for it.
    fn compile_once(&self, program: &Program<'_>, key: &Key) -> Result<Entry, CompileError> {
        let _lock = self.cache.lock(key);
        if let Some(entry) = self.cache.read(key) {
            return Ok(entry);
        }
        self.compilations.fetch_add(1, Ordering::Relaxed);
        let entry = self.compile_now(program)?;
        self.cache.write(key, &entry);
        Ok(entry)
    }

    fn compile_now(&self, program: &Program<'_>) -> Result<Entry, CompileError> {
        check_defines(program)?;
        let options = program.options();
        let Outcome { result, log } = self.run(program, &options, Image::Cubin)?;
        match result {
            Ok(image) => Ok(Entry {
                image,
                log: self.quoted(program, log),
            }),
            Err(Status {
                code: Status::COMPILATION | Status::INVALID_OPTION,
                ..
            }) => Err(CompileError::Rejected {
                name: program.source.name,
                arch: program.arch,
                nvrtc: self.version,
                options,
                log: self.quoted(program, log),
            }),
            Err(status) => Err(self.failure(program, status, log)),
        }
    }

    /// The log with source lines under every message. The front end quotes them itself.
    fn quoted(&self, program: &Program<'_>, log: String) -> String {
        if !ptx::is_named(&log) {
            return log;
        }
        let compiled = self.run(program, &program.options_for_ptx(), Image::Ptx);
        match compiled.map(|outcome| outcome.result) {
            Ok(Ok(text)) => {
                let folder = env::current_dir().unwrap_or_default();
                ptx::quote(&log, &String::from_utf8_lossy(&text), &folder)
            }
            _ => log,
        }
    }

    fn run(
        &self,
        program: &Program<'_>,
        options: &[String],
        image: Image,
    ) -> Result<Outcome, CompileError> {
        let source = program.source;
        let options = options.iter().map(|option| c_string(source.name, option));
        let headers = source.headers.iter().map(|header| {
            Ok((
                c_string(header.name, header.name)?,
                c_string(header.name, header.text)?,
            ))
        });
        let outcome = self.nvrtc.compile(
            (
                &c_string(source.name, source.name)?,
                &c_string(source.name, source.text)?,
            ),
            &headers.collect::<Result<Vec<_>, _>>()?,
            &options.collect::<Result<Vec<_>, _>>()?,
            image,
        );
        outcome.map_err(|status| self.failure(program, status, String::new()))
    }

    fn failure(&self, program: &Program<'_>, status: Status, log: String) -> CompileError {
        CompileError::Nvrtc {
            name: program.source.name,
            library: self.library.clone(),
            nvrtc: self.version,
            code: status.code,
            status: status.name,
            log,
        }
    }
}

/// A thread that panicked here left the value as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn c_string(name: &'static str, text: &str) -> Result<CString, CompileError> {
    CString::new(text).map_err(|error| CompileError::Nul {
        name,
        position: error.nul_position(),
    })
}

fn check_defines(program: &Program<'_>) -> Result<(), CompileError> {
    let is_identifier = |name: &str| {
        name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
            && name
                .chars()
                .all(|char| char.is_ascii_alphanumeric() || char == '_')
    };
    let bad = |(name, value): &&(&str, String)| {
        !is_identifier(name) || value.contains(['\n', '\r', '\0'])
    };
    match program.defines.iter().find(bad) {
        None => Ok(()),
        Some((macro_name, value)) => Err(CompileError::Define {
            name: program.source.name,
            macro_name: (*macro_name).to_owned(),
            value: value.clone(),
        }),
    }
}
