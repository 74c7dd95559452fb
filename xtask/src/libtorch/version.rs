//! The version of the libtorch in a folder, from whichever file tells it.

use std::fs;
use std::path::Path;

/// As the folder has it, such as `2.11.0+cu130`; `None` where no file tells.
pub fn of_folder(folder: &Path) -> Option<String> {
    let read = |relative: &str| fs::read_to_string(folder.join(relative)).ok();
    // The archive of libtorch carries the first, a wheel the second; headers are everywhere.
    read("build-version")
        .map(|text| text.trim().to_owned())
        .or_else(|| read("version.py").and_then(|text| of_version_py(&text)))
        .or_else(|| {
            // Up to torch 2.8 the macros were in the second header, which now includes the first.
            let headers = ["headeronly/version.h", "csrc/api/include/torch/version.h"];
            headers.iter().find_map(|header| {
                read(&format!("include/torch/{header}")).and_then(|text| of_header(&text))
            })
        })
}

/// Whether this is the wanted release, whatever its local part says of CUDA.
pub fn is_wanted(version: &str) -> bool {
    version.split('+').next() == Some(super::WANTED)
}

fn of_version_py(text: &str) -> Option<String> {
    let assignment = text.lines().find(|line| line.starts_with("__version__"))?;
    let value = assignment.split_once('=')?.1.trim();
    Some(value.trim_matches(['\'', '"']).to_owned())
}

fn of_header(text: &str) -> Option<String> {
    let part = |name: &str| {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let is_it = words.next() == Some("#define") && words.next() == Some(name);
            words.next().filter(|_| is_it)?.parse::<u32>().ok()
        })
    };
    let major = part("TORCH_VERSION_MAJOR")?;
    let minor = part("TORCH_VERSION_MINOR")?;
    let patch = part("TORCH_VERSION_PATCH")?;
    Some(format!("{major}.{minor}.{patch}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    const HEADER: &str = "#pragma once

/// Indicates the major version of LibTorch.
#define TORCH_VERSION_MAJOR 2
#define TORCH_VERSION_MINOR 11
#define TORCH_VERSION_PATCH 0
#define TORCH_VERSION_ABI_TAG 0
";

    #[test]
    fn the_three_kinds_of_folders() {
        let machine = Machine::bare();
        machine.file("archive/build-version", "2.11.0+cpu\n");
        machine.file("archive/include/torch/headeronly/version.h", HEADER);
        assert_eq!(
            of_folder(&machine.path("archive")).as_deref(),
            Some("2.11.0+cpu")
        );

        let version_py =
            "from typing import Optional\n\n__version__ = '2.11.0+cu130'\ndebug = False\n";
        machine.file("wheel/version.py", version_py);
        assert_eq!(
            of_folder(&machine.path("wheel")).as_deref(),
            Some("2.11.0+cu130")
        );

        machine.file("headers/include/torch/headeronly/version.h", HEADER);
        assert_eq!(
            of_folder(&machine.path("headers")).as_deref(),
            Some("2.11.0")
        );
        let older = HEADER.replace("MINOR 11", "MINOR 4");
        machine.file(
            "older/include/torch/csrc/api/include/torch/version.h",
            &older,
        );
        assert_eq!(of_folder(&machine.path("older")).as_deref(), Some("2.4.0"));

        assert_eq!(of_folder(&machine.path("target")), None);
    }

    #[test]
    fn the_local_part_does_not_matter_and_the_rest_does() {
        for wanted in ["2.11.0", "2.11.0+cpu", "2.11.0+cu130"] {
            assert!(is_wanted(wanted), "{wanted}");
        }
        for other in ["2.11.1", "2.11.0a0+git70d99e9", "2.12.0+cpu", "2.11", ""] {
            assert!(!is_wanted(other), "{other}");
        }
    }
}
