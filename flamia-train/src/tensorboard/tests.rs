use std::process::Command;

use super::*;

fn event_files(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    files.collect()
}

fn steps(log: &EventLog) -> Vec<i64> {
    log.scalars.iter().map(|scalar| scalar.step).collect()
}

#[test]
fn what_is_written_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(&folder.path().join("runs/new")).unwrap();
    writer.resume_at(7).unwrap();
    writer.scalar("loss/train", 7, 5.5).unwrap();
    writer.scalar("loss/train", 8, f64::NAN).unwrap();
    writer.text("settings", 8, "steps = 300\nµ").unwrap();

    let log = read_events(writer.path()).unwrap();
    assert_eq!(log.ending, Ending::Whole);
    assert_eq!(log.starts, [7]);
    assert_eq!(log.texts, [("settings".into(), 8, "steps = 300\nµ".into())]);
    assert_eq!(steps(&log), [7, 8]);
    assert_eq!(
        (&*log.scalars[0].tag, log.scalars[0].value),
        ("loss/train", 5.5)
    );
    assert!(log.scalars[1].value.is_nan());
    assert!((log.scalars[0].wall_time - now().as_secs_f64()).abs() < 60.0);
}

/// The bytes of the records, assembled by hand from the format's description: length, its masked
/// CRC-32C, event, its masked CRC-32C, all little-endian. The length's checksum was computed apart,
/// bit by bit from the polynomial.
#[test]
fn the_first_record_is_the_file_version_in_the_published_format() {
    let folder = tempfile::tempdir().unwrap();
    let writer = EventWriter::create(folder.path()).unwrap();
    let bytes = fs::read(writer.path()).unwrap();
    assert_eq!(bytes[..8], 24_u64.to_le_bytes());
    assert_eq!(bytes[8..12], 0x224b_7fa3_u32.to_le_bytes());
    // Field 1, a double: the time. Field 3, a string: the version. A step of 0 is left out.
    assert_eq!(bytes[12], 1 << 3 | 1);
    assert_eq!(bytes[21..23], [3 << 3 | 2, 13]);
    assert_eq!(&bytes[23..36], b"brain.Event:2");
    assert_eq!(bytes.len(), 24 + 16);
    let name = writer
        .path()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_string();
    assert!(name.starts_with("events.out.tfevents."), "{name}");
}

#[test]
fn writers_of_one_folder_process_and_second_do_not_share_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut writers: Vec<_> = (0..20)
        .map(|_| EventWriter::create(folder.path()).unwrap())
        .collect();
    for step in 0..50 {
        for (i, writer) in writers.iter_mut().enumerate() {
            writer.scalar(&format!("curve {i}"), step, 1.0).unwrap();
        }
    }
    assert_eq!(event_files(folder.path()).len(), 20);
    for (i, writer) in writers.iter().enumerate() {
        let log = read_events(writer.path()).unwrap();
        assert_eq!(steps(&log), (0..50).collect::<Vec<_>>());
        assert!(
            log.scalars
                .iter()
                .all(|scalar| scalar.tag == format!("curve {i}"))
        );
    }
}

/// Which folder the child process of a test writes to.
const CHILD_FOLDER: &str = "EVENT_WRITER_CHILD_FOLDER";

/// Runs the test `name` again in a process of its own, which finds a folder in [`CHILD_FOLDER`].
fn in_a_child(name: &str, folder: &Path) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args([
            &format!("tensorboard::tests::{name}"),
            "--exact",
            "--nocapture",
        ])
        .env(CHILD_FOLDER, folder)
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap()
}

#[test]
fn nothing_is_lost_when_the_process_exits_at_once() {
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        let mut writer = EventWriter::create(Path::new(&folder)).unwrap();
        for step in 0..10_000 {
            writer.scalar("loss", step, step as f64 / 8.0).unwrap();
        }
        std::process::exit(42);
    }
    let folder = tempfile::tempdir().unwrap();
    let status = in_a_child(
        "nothing_is_lost_when_the_process_exits_at_once",
        folder.path(),
    );
    assert_eq!(status.code(), Some(42));
    let log = read_events(&event_files(folder.path())[0]).unwrap();
    assert_eq!(steps(&log), (0..10_000).collect::<Vec<_>>());
    assert!(
        log.scalars
            .iter()
            .all(|scalar| scalar.value == scalar.step as f32 / 8.0)
    );
    assert_eq!(log.ending, Ending::Whole);
}

#[test]
fn nothing_is_lost_when_the_process_aborts() {
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        let mut writer = EventWriter::create(Path::new(&folder)).unwrap();
        (0..10).for_each(|step| writer.scalar("loss", step, 1.0).unwrap());
        std::process::abort();
    }
    let folder = tempfile::tempdir().unwrap();
    let status = in_a_child("nothing_is_lost_when_the_process_aborts", folder.path());
    assert_eq!(status.code(), None, "killed by a signal");
    let log = read_events(&event_files(folder.path())[0]).unwrap();
    assert_eq!(steps(&log), (0..10).collect::<Vec<_>>());
}

#[test]
fn a_file_cut_off_anywhere_gives_its_whole_records() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(folder.path()).unwrap();
    let mut ends = vec![fs::metadata(writer.path()).unwrap().len() as usize];
    for step in 0..3 {
        writer.scalar("loss", step, 1.0).unwrap();
        ends.push(fs::metadata(writer.path()).unwrap().len() as usize);
    }
    let bytes = fs::read(writer.path()).unwrap();
    let cut = folder.path().join("cut");
    for length in ends[0]..bytes.len() {
        fs::write(&cut, &bytes[..length]).unwrap();
        let log = read_events(&cut).unwrap();
        let whole = ends.iter().filter(|&&end| end <= length).count();
        let offset = ends[whole - 1];
        assert_eq!(log.scalars.len(), whole - 1, "{length} bytes");
        let ending = if offset == length {
            Ending::Whole
        } else {
            Ending::CutOff { offset }
        };
        assert_eq!(log.ending, ending, "{length} bytes");
    }
}

#[test]
fn every_flipped_bit_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = EventWriter::create(folder.path()).unwrap();
    let start = fs::metadata(writer.path()).unwrap().len() as usize;
    writer.scalar("loss", 1, 2.0).unwrap();
    let bytes = fs::read(writer.path()).unwrap();
    let flipped = folder.path().join("flipped");
    for bit in 8 * start..8 * bytes.len() {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&flipped, &bytes).unwrap();
        match read_events(&flipped) {
            Err(EventError::Damaged { path, offset, .. }) => {
                assert_eq!((path, offset), (flipped.clone(), start));
            }
            other => panic!("bit {bit}: {other:?}"),
        }
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = EventWriter::create(&file.join("runs")).unwrap_err();
    assert!(error.to_string().contains("file/runs"), "{error}");
    assert!(matches!(
        read_events(&file.join("x")),
        Err(EventError::Read { .. })
    ));
}

#[cfg(target_os = "linux")]
#[test]
fn a_read_only_folder_is_an_error_with_its_path() {
    // Permissions do not bind every user; in this folder nobody can make a file.
    match EventWriter::create(Path::new("/proc/self")) {
        Err(EventError::Write { path, .. }) => {
            assert!(path.starts_with("/proc/self/"), "{}", path.display());
        }
        other => panic!("{other:?}"),
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_that_repeats_and_never_a_panic() {
    let full = |path: &str| File::options().write(true).open(path).unwrap();
    let started = EventWriter::start("/dev/full".into(), full("/dev/full"));
    match started {
        Err(EventError::Write { source, .. }) => {
            assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        }
        other => panic!("{other:?}"),
    }
    let mut writer = EventWriter {
        path: "/dev/full".into(),
        file: full("/dev/full"),
        length: 0,
    };
    for step in 0..3 {
        assert!(matches!(
            writer.scalar("loss", step, 1.0),
            Err(EventError::Write { .. })
        ));
    }
}

/// A write that fails half-way, by a limit on the size of a child's files: the half is taken back.
#[cfg(target_os = "linux")]
#[test]
fn a_failed_write_leaves_whole_records_and_the_next_one_fits_behind_them() {
    const NAME: &str = "a_failed_write_leaves_whole_records_and_the_next_one_fits_behind_them";
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        let mut writer = EventWriter::create(Path::new(&folder)).unwrap();
        writer.scalar("loss", 1, 1.0).unwrap();
        match writer.text("settings", 2, &"too long for the limit ".repeat(100_000)) {
            Err(EventError::Write { source, .. }) => {
                assert_eq!(source.kind(), io::ErrorKind::FileTooLarge);
            }
            other => panic!("{other:?}"),
        }
        writer.scalar("loss", 3, 3.0).unwrap();
        std::process::exit(42);
    }
    let folder = tempfile::tempdir().unwrap();
    let limited = "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\"";
    let status = Command::new("sh")
        .args(["-c", limited])
        .arg(std::env::current_exe().unwrap())
        .args([
            &format!("tensorboard::tests::{NAME}"),
            "--exact",
            "--nocapture",
        ])
        .env(CHILD_FOLDER, folder.path())
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(42));
    let log = read_events(&event_files(folder.path())[0]).unwrap();
    assert_eq!((steps(&log), log.ending), (vec![1, 3], Ending::Whole));
}
