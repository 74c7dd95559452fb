//! NVRTC's C interface, opened at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

use crate::version::Version;

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

/// The library's functions. They stay valid because the library is never closed.
#[derive(Debug)]
pub struct Nvrtc {
    create: Create,
    compile: Compile,
    log_size: Size,
    log: Bytes,
    cubin_size: Size,
    cubin: Bytes,
    ptx_size: Size,
    ptx: Bytes,
    destroy: Destroy,
    error_string: ErrorString,
    version: GetVersion,
}

/// What a compilation is asked for.
#[derive(Clone, Copy)]
pub enum Image {
    Cubin,
    Ptx,
}

/// A compilation that NVRTC carried out, successful or not.
pub struct Outcome {
    pub result: Result<Vec<u8>, Status>,
    pub log: String,
}

/// A status other than success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub code: c_int,
    /// NVRTC's name of it.
    pub name: String,
}

impl Status {
    pub const INVALID_OPTION: c_int = 5;
    pub const COMPILATION: c_int = 6;
    pub const BUILTIN_OPERATION: c_int = 7;
}

impl Nvrtc {
    /// Opens the library at a path or, for a bare file name, where the loader finds it. The error
    /// is the loader's message.
    pub fn open(library: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: NVRTC's initialisers have no preconditions, and its documented functions have
        // the types above since CUDA 11.1, where the cubin functions appeared.
        unsafe {
            let library = Library::new(library)?;
            let functions = Self {
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
                log: *library.get(b"nvrtcGetProgramLog\0")?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *library.get(b"nvrtcGetCUBIN\0")?,
                ptx_size: *library.get(b"nvrtcGetPTXSize\0")?,
                ptx: *library.get(b"nvrtcGetPTX\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                error_string: *library.get(b"nvrtcGetErrorString\0")?,
                version: *library.get(b"nvrtcVersion\0")?,
            };
            std::mem::forget(library);
            Ok(functions)
        }
    }

    pub fn version(&self) -> Result<Version, Status> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        self.check(unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok(Version { major, minor })
    }

    /// Compiles a source with its headers, given as (name, text).
    pub fn compile(
        &self,
        source: (&CStr, &CStr),
        headers: &[(CString, CString)],
        options: &[CString],
        image: Image,
    ) -> Result<Outcome, Status> {
        let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<_> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Owned {
            nvrtc: self,
            program: ptr::null_mut(),
        };
        // SAFETY: every string is NUL-terminated and outlives `program`, both arrays have the
        // length given, and the program is created before it is compiled.
        let compiled = unsafe {
            self.check((self.create)(
                &mut program.program,
                source.1.as_ptr(),
                source.0.as_ptr(),
                headers.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            ))?;
            (self.compile)(program.program, options.len() as c_int, options.as_ptr())
        };
        let mut log = program.read(self.log_size, self.log)?;
        log.truncate(log.iter().position(|&byte| byte == 0).unwrap_or(log.len()));
        let (size, bytes) = match image {
            Image::Cubin => (self.cubin_size, self.cubin),
            Image::Ptx => (self.ptx_size, self.ptx),
        };
        Ok(Outcome {
            result: self
                .check(compiled)
                .and_then(|()| program.read(size, bytes)),
            log: String::from_utf8_lossy(&log).into_owned(),
        })
    }

    fn check(&self, code: c_int) -> Result<(), Status> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any integer and returns a static string.
        let name = unsafe { CStr::from_ptr((self.error_string)(code)) };
        let name = name.to_string_lossy().into_owned();
        Err(Status { code, name })
    }
}

struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Owned<'_> {
    fn read(&self, size: Size, bytes: Bytes) -> Result<Vec<u8>, Status> {
        let mut length = 0;
        // SAFETY: the program is alive, and the buffer has the length that NVRTC says it fills.
        unsafe {
            self.nvrtc.check(size(self.program, &mut length))?;
            let mut buffer = vec![0_u8; length];
            self.nvrtc
                .check(bytes(self.program, buffer.as_mut_ptr().cast()))?;
            Ok(buffer)
        }
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created by this library, and destroyed once.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

/// Keeps a shared library open for the rest of the process.
pub fn keep_open(library: &Path) -> Result<(), libloading::Error> {
    // SAFETY: it is only used for NVRTC's builtins, a library of data without initialisers.
    let library = unsafe { Library::new(library) }?;
    std::mem::forget(library);
    Ok(())
}
