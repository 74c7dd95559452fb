//! A run's folder: where it lies, what makes it a run, and that one process writes to it.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};

/// The settings the run was started with; its presence makes a folder a run.
pub const SETTINGS: &str = "settings.toml";

/// Where runs without a name of their own lie.
pub const RUNS: &str = "runs";

/// A run's folder, held by this process alone, or by rank 0 for all ranks of a run.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Locked as long as it is open; the system lets go of it however the process ends. None where another
    /// process holds it for this one too.
    _lock: Option<File>,
}

/// Why a folder cannot be a run's.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// The file system.
    #[error("cannot use {} as the run's folder", path.display())]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A new run would overwrite an old one.
    #[error("{} already holds a run: continue it with --resume, or give another --out", path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume.
    #[error("{} holds no run to resume: it has no {SETTINGS}", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// Another process is at it.
    #[error("another process is training in {}: wait for it, or give another --out", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
}

impl RunFolder {
    /// Makes `path` the folder of a new run.
    ///
    /// # Errors
    /// [`RunFolderError::Occupied`] when it is already a run's.
    pub fn create(path: &Path) -> Result<Self, RunFolderError> {
        fs::create_dir_all(path).map_err(io(path))?;
        let folder = Self::lock(path)?;
        match folder.settings().exists() {
            true => Err(RunFolderError::Occupied { path: path.into() }),
            false => Ok(folder),
        }
    }

    /// Opens the folder of a run that continues.
    ///
    /// # Errors
    /// [`RunFolderError::NoRun`] when there is none.
    pub fn open(path: &Path) -> Result<Self, RunFolderError> {
        match path.join(SETTINGS).exists() {
            true => Self::lock(path),
            false => Err(RunFolderError::NoRun { path: path.into() }),
        }
    }

    /// The folder of a run that rank 0 of its ranks holds, for another rank, which writes nothing to it.
    pub fn follow(path: &Path) -> Self {
        Self {
            path: path.into(),
            _lock: None,
        }
    }

    /// The folder of a new run that was given none: `runs/<UTC time>-<attention>`.
    pub fn named(now: DateTime<Utc>, attention: &str) -> PathBuf {
        Path::new(RUNS).join(format!("{}-{attention}", now.format("%Y%m%d-%H%M%S")))
    }

    /// The run in `runs` that was touched last.
    ///
    /// # Errors
    /// [`RunFolderError::NoRun`] when `runs` holds none.
    pub fn newest(runs: &Path) -> Result<PathBuf, RunFolderError> {
        let none = || RunFolderError::NoRun { path: runs.into() };
        let entries = fs::read_dir(runs).map_err(|_| none())?;
        entries
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let touched = fs::metadata(path.join(SETTINGS)).ok()?.modified().ok()?;
                Some((touched, path))
            })
            .max()
            .map(|(_, path)| path)
            .ok_or_else(none)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The run's settings file.
    pub fn settings(&self) -> PathBuf {
        self.path.join(SETTINGS)
    }

    fn lock(path: &Path) -> Result<Self, RunFolderError> {
        let name = path.join(".lock");
        let lock = File::create(&name).map_err(io(&name))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self {
                path: path.into(),
                _lock: Some(lock),
            }),
            Err(TryLockError::WouldBlock) => Err(RunFolderError::Busy { path: path.into() }),
            Err(TryLockError::Error(source)) => Err(io(&name)(source)),
        }
    }
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> RunFolderError {
    let path = path.to_path_buf();
    move |source| RunFolderError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_one_run_and_one_process_at_a_time() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run");
        assert!(matches!(
            RunFolder::open(&path),
            Err(RunFolderError::NoRun { .. })
        ));
        let first = RunFolder::create(&path).unwrap();
        assert!(matches!(
            RunFolder::create(&path),
            Err(RunFolderError::Busy { .. })
        ));
        drop(first);

        // A run that was killed before it saved its settings is none yet.
        let folder = RunFolder::create(&path).unwrap();
        fs::write(folder.settings(), "").unwrap();
        drop(folder);
        assert!(matches!(
            RunFolder::create(&path),
            Err(RunFolderError::Occupied { .. })
        ));
        assert!(RunFolder::open(&path).is_ok());
    }

    #[test]
    fn the_newest_run_is_the_one_touched_last() {
        let runs = tempfile::tempdir().unwrap();
        assert!(matches!(
            RunFolder::newest(runs.path()),
            Err(RunFolderError::NoRun { .. })
        ));
        let start = std::time::SystemTime::now();
        for (name, age) in [("b", 20), ("a", 10), ("c", 30)] {
            let folder = runs.path().join(name);
            fs::create_dir(&folder).unwrap();
            let settings = File::create(folder.join(SETTINGS)).unwrap();
            settings
                .set_modified(start - std::time::Duration::from_secs(age))
                .unwrap();
        }
        fs::create_dir(runs.path().join("no run")).unwrap();
        assert_eq!(
            RunFolder::newest(runs.path()).unwrap(),
            runs.path().join("a")
        );
    }

    #[test]
    fn default_names_sort_by_time() {
        let time = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        let expected = Path::new("runs").join("20231114-221320-mxfp8");
        assert_eq!(RunFolder::named(time, "mxfp8"), expected);
    }
}
