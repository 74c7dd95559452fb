//! Commands that install system packages, in the words of the package manager that is there.

use crate::surroundings::Surroundings;

/// The names under which distributions ship one thing.
pub struct Package {
    apt: &'static str,
    dnf: &'static str,
    pacman: &'static str,
    zypper: &'static str,
    apk: &'static str,
    /// The whole command, where there is no package manager to count on.
    macos: &'static str,
}

pub const CXX_COMPILER: Package = Package {
    apt: "g++",
    dnf: "gcc-c++",
    pacman: "gcc",
    zypper: "gcc-c++",
    apk: "g++",
    macos: "xcode-select --install",
};

pub const PYTHON: Package = Package {
    apt: "python3 python3-venv",
    dnf: "python3",
    pacman: "python",
    zypper: "python3",
    apk: "python3",
    macos: "brew install python",
};

pub const VENV_MODULE: Package = Package {
    apt: "python3-venv",
    dnf: "python3-pip",
    pacman: "python",
    zypper: "python3-pip",
    apk: "py3-pip",
    macos: "brew install python",
};

impl Package {
    /// The command that installs the package here; Debian's where no manager is recognised.
    pub fn command(&self, here: &Surroundings) -> String {
        if cfg!(target_os = "macos") {
            return self.macos.to_owned();
        }
        let managers = [
            ("apt-get", "apt install", self.apt),
            ("dnf", "dnf install", self.dnf),
            ("pacman", "pacman -S", self.pacman),
            ("zypper", "zypper install", self.zypper),
            ("apk", "apk add", self.apk),
        ];
        let known = managers
            .iter()
            .find(|(program, ..)| here.find(program).is_some());
        let (_, install, name) = known.unwrap_or(&managers[0]);
        format!("sudo {install} {name}")
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use crate::testing::Machine;

    #[test]
    fn the_command_is_that_of_the_manager_found() {
        let machine = Machine::bare();
        assert_eq!(
            CXX_COMPILER.command(&machine.here()),
            "sudo apt install g++"
        );
        machine.script("dnf", "");
        assert_eq!(
            CXX_COMPILER.command(&machine.here()),
            "sudo dnf install gcc-c++"
        );
    }
}
