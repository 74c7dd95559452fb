//! Errors and remarks of ptxas, which name lines of a PTX that nobody has seen, told by the lines
//! of the source.

use std::path::Path;

/// The log with, under each message that names a line of the PTX, that line and the place in the
/// source that it comes from. NVRTC makes the names of sources paths in `folder`, where it ran.
pub(crate) fn quote(log: &str, ptx: &str, folder: &Path) -> String {
    let lines: Vec<_> = ptx.lines().collect();
    let mut quoted = String::new();
    for message in log.lines() {
        quoted.push_str(message);
        quoted.push('\n');
        let Some(index) = named_line(message) else {
            continue;
        };
        let Some(line) = lines.get(index) else {
            continue;
        };
        if let Some(place) = place(&lines, index, folder) {
            quoted.push_str(&format!("  from {place}:\n"));
        }
        quoted.push_str(&format!("  {}\n", line.trim()));
    }
    quoted
}

/// Whether the log names lines of the PTX.
pub(crate) fn is_named(log: &str) -> bool {
    log.lines().any(|line| named_line(line).is_some())
}

/// The index of the line that a message such as
/// `ptxas application ptx input, line 28; error   : ...` or
/// `ptxas info    : (C7519) warpgroup.arrive is injected in around line 51 by compiler ...` names.
fn named_line(message: &str) -> Option<usize> {
    let (_, rest) = message.strip_prefix("ptxas ")?.split_once(" line ")?;
    let number: usize = rest.split([';', ' ']).next()?.parse().ok()?;
    number.checked_sub(1)
}

/// `name(line)` of the source, by the last `.loc` directive before, and `name` by its `.file`.
fn place(lines: &[&str], index: usize, folder: &Path) -> Option<String> {
    let mut before = lines[..index].iter().rev();
    let location = before.find_map(|line| line.trim().strip_prefix(".loc"))?;
    let mut numbers = location.split_whitespace();
    let (file, line) = (numbers.next()?, numbers.next()?);
    let name = lines.iter().find_map(|line| {
        let (number, name) = line
            .trim()
            .strip_prefix(".file")?
            .trim()
            .split_once(char::is_whitespace)?;
        (number == file).then(|| name.split('"').nth(1)).flatten()
    })?;
    let path = Path::new(name);
    let name = path.strip_prefix(folder).unwrap_or(path).display();
    Some(format!("{name}({line})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_ptx_is_told_by_the_source() {
        let ptx = ".visible .entry k()\n{\n\t.loc\t2 7 3\n\tfirst;\n\t.loc 1 9 1, function_name $x, inlined_at 2 1 1\n\tsecond;\n}\n\
            \t.file\t1 \"a.cuh\"\n\t.file\t2 \"/here/dir/k.cu\"\n";
        let log = "ptxas application ptx input, line 4; error   : bad\n\
            ptxas info    : (C7519) injected in around line 6 by compiler\n\
            ptxas application ptx input, line 60; error   : beyond\n\
            ptxas fatal   : aborted\n";
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let expected = [
            "ptxas application ptx input, line 4; error   : bad",
            "  from dir/k.cu(7):",
            "  first;",
            "ptxas info    : (C7519) injected in around line 6 by compiler",
            "  from a.cuh(9):",
            "  second;",
            "ptxas application ptx input, line 60; error   : beyond",
            "ptxas fatal   : aborted",
        ];
        assert_eq!(lines(&quote(log, ptx, Path::new("/here"))), expected);
        assert!(is_named(log) && !is_named("k.cu(1): error: line 3; none\n"));
    }
}
