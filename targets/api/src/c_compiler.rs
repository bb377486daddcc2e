//! Versions and logs of C compilers.

/// Returns `gcc version 12.2.0 (Debian …), x86_64-linux-gnu` from the output of `-v`.
pub fn version_line(text: &str) -> Option<String> {
    let mut lines = text.lines().map(str::trim);
    let machine = lines.clone().find_map(|line| line.strip_prefix("Target: "));
    let version = lines.find(|line| line.contains(" version "))?;
    Some(format!(
        "{version}, {}",
        machine.unwrap_or(std::env::consts::ARCH)
    ))
}

/// Returns `gcc 12.2.0` from `gcc version 12.2.0 (Debian …), x86_64-linux-gnu`.
pub fn short_name(version: &str) -> Option<String> {
    if version.starts_with("zig ") {
        return Some(version.to_string());
    }
    let (product, rest) = version.split_once(" version ")?;
    let number = rest.split([' ', ',']).next()?;
    Some(format!("{} {number}", product.rsplit(' ').next()?))
}

/// Shortens a log to a length that you can act on: a wrong macro can repeat itself thousands of
/// times, also within one line.
pub fn trim(log: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<String> = log.trim().lines().map(short).collect();
    match lines.len() {
        n if n <= LINES => lines.join("\n"),
        n => format!("{}\n… {} more lines", lines[..LINES].join("\n"), n - LINES),
    }
}

/// Returns a line of a log, or the beginning of a very long one.
fn short(line: &str) -> String {
    const COLUMNS: usize = 500;
    match line.char_indices().nth(COLUMNS) {
        None => line.to_string(),
        Some((end, _)) => {
            let left = line[end..].chars().count();
            format!("{}… {left} more characters", &line[..end])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_known_compilers_are_read() {
        let gcc = "Using built-in specs.\nCOLLECT_GCC=cc\nCOLLECT_LTO_WRAPPER=/usr/lib/lto\n\
                   Target: x86_64-linux-gnu\nThread model: posix\n\
                   gcc version 12.2.0 (Debian 12.2.0-14) \n";
        let expected = "gcc version 12.2.0 (Debian 12.2.0-14), x86_64-linux-gnu";
        assert_eq!(version_line(gcc).unwrap(), expected);
        let clang = "Debian clang version 19.1.7 (3+b1)\nTarget: x86_64-pc-linux-gnu\n";
        let expected = "Debian clang version 19.1.7 (3+b1), x86_64-pc-linux-gnu";
        assert_eq!(version_line(clang).unwrap(), expected);
        assert_eq!(version_line("usage: tool [options]"), None);
    }

    #[test]
    fn long_logs_are_cut() {
        let log = "line\n".repeat(100);
        assert!(trim(&log).ends_with("… 60 more lines"));
        let one = trim(&"é".repeat(10_000));
        assert!(one.ends_with("é… 9500 more characters"), "{}", one.len());
        assert_eq!(trim("\n one\n"), "one");
    }

    #[test]
    fn names_are_short() {
        for (version, name) in [
            (
                "gcc version 12.2.0 (Debian 12.2.0-14), x86_64-linux-gnu",
                "gcc 12.2.0",
            ),
            (
                "Debian clang version 19.1.7 (3+b1), x86_64-pc-linux-gnu",
                "clang 19.1.7",
            ),
            (
                "Apple clang version 15.0.0 (clang-1500), arm64",
                "clang 15.0.0",
            ),
            ("zig 0.17.0", "zig 0.17.0"),
        ] {
            assert_eq!(short_name(version).as_deref(), Some(name));
        }
        assert_eq!(short_name("unknown version"), None);
    }
}
