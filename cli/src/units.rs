//! Numbers in the form that people read and write.

use std::time::Duration;

/// Formats bytes, such as `1.5 KiB` or `12 B`.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Formats a count of operations, such as `1.5 GFLOP`.
pub fn flops(n: f64) -> String {
    scaled(
        n,
        1000.0,
        &["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"],
    )
}

/// Formats an arithmetic rate, such as `989 TFLOP/s`.
pub fn flop_rate(n: f64) -> String {
    flops(n) + "/s"
}

/// Formats memory traffic, such as `1.5 MB`.
pub fn traffic(n: f64) -> String {
    scaled(n, 1000.0, &["B", "kB", "MB", "GB", "TB"])
}

/// Formats a bandwidth, such as `3.35 TB/s`.
pub fn byte_rate(n: f64) -> String {
    traffic(n) + "/s"
}

/// Formats a time, such as `1.53 ms`.
pub fn seconds(s: f64) -> String {
    match s {
        s if !s.is_finite() => "-".to_string(),
        0.0 => "0 s".to_string(),
        s if s < 1e-6 => format!("{} ns", short(s * 1e9)),
        s if s < 1e-3 => format!("{} µs", short(s * 1e6)),
        s if s < 1.0 => format!("{} ms", short(s * 1e3)),
        s => format!("{} s", short(s)),
    }
}

/// Formats an age, such as `3 days ago`.
pub fn ago(age: Duration) -> String {
    let s = age.as_secs();
    let (n, unit) = match s {
        0..60 => return "just now".to_string(),
        60..3600 => (s / 60, "minute"),
        3600..86400 => (s / 3600, "hour"),
        _ => (s / 86400, "day"),
    };
    format!("{n} {} ago", plural(n as usize, unit))
}

/// Returns the word in singular or plural: `kernel` or `kernels`.
pub fn plural(n: usize, word: &str) -> String {
    match n {
        1 => word.to_string(),
        _ => format!("{word}s"),
    }
}

/// Formats a count with its word: `1 kernel`, `3 kernels`.
pub fn count(n: usize, word: &str) -> String {
    format!("{n} {}", plural(n, word))
}

/// Formats a number with three significant digits.
pub fn short(n: f64) -> String {
    match n.abs() {
        a if a >= 99.95 => format!("{n:.0}"),
        a if a >= 9.995 => format!("{n:.1}"),
        _ => format!("{n:.2}"),
    }
}

fn scaled(mut n: f64, by: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // Round up to the next unit from 999.5 on, because 999.6 would be written as 1000.
    while n >= by - 0.5 && unit + 1 < units.len() {
        n /= by;
        unit += 1;
    }
    let whole = unit == 0 || n.fract() == 0.0;
    let number = if whole { format!("{n:.0}") } else { short(n) };
    format!("{number} {}", units[unit])
}

/// Parses a size such as `500MB`, `2 GiB`, `1.5k` or `4096`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let factor = factor(unit)?;
    let whole = number.parse::<u64>().ok();
    let bytes = match whole {
        Some(whole) => whole.checked_mul(factor),
        // u64::MAX as f64 is 2^64, the first number that does not fit.
        None => Some(positive(number, "500MB")? * factor as f64)
            .filter(|bytes| *bytes < u64::MAX as f64)
            .map(|bytes| bytes as u64),
    };
    bytes.ok_or_else(|| "more bytes than any machine has; write it as 500MB".to_string())
}

/// Returns the number of bytes in a unit.
fn factor(unit: &str) -> Result<u64, String> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Ok(1),
        "k" | "kb" => Ok(1000),
        "m" | "mb" => Ok(1_000_000),
        "g" | "gb" => Ok(1_000_000_000),
        "t" | "tb" => Ok(1_000_000_000_000),
        "kib" => Ok(1 << 10),
        "mib" => Ok(1 << 20),
        "gib" => Ok(1 << 30),
        "tib" => Ok(1 << 40),
        _ => Err(format!(
            "unknown unit `{unit}`; write bytes, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )),
    }
}

/// Parses a duration such as `30d`, `12h`, `90m` or `45s`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let factor = match unit {
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        "w" => 7.0 * 86400.0,
        _ => return Err("write a number and s, m, h, d or w, such as 30d".to_string()),
    };
    let seconds = positive(number, "30d")? * factor;
    let duration = Duration::try_from_secs_f64(seconds).ok();
    duration.ok_or_else(|| "longer than any file is old; write it as 30d".to_string())
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| c.is_alphabetic()).unwrap_or(text.len());
    (text[..end].trim(), text[end..].trim())
}

fn positive(number: &str, example: &str) -> Result<f64, String> {
    let value: f64 = number
        .parse()
        .map_err(|_| format!("no number; write it as {example}"))?;
    if value >= 0.0 && value.is_finite() {
        Ok(value)
    } else {
        Err(format!("must not be negative; write it as {example}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (text, expected) in [
            (bytes(0), "0 B"),
            (bytes(1536), "1.50 KiB"),
            (bytes(1 << 30), "1 GiB"),
            (flop_rate(989.4e12), "989 TFLOP/s"),
            (byte_rate(3.35e12), "3.35 TB/s"),
            (traffic(999_700.0), "1.00 MB"),
            (seconds(0.001_53), "1.53 ms"),
            (seconds(2.5e-9), "2.50 ns"),
            (seconds(12.0), "12.0 s"),
            (ago(Duration::from_secs(7300)), "2 hours ago"),
        ] {
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn sizes_and_ages_read() {
        assert_eq!(parse_bytes("500MB"), Ok(500_000_000));
        assert_eq!(parse_bytes("2 GiB"), Ok(2 << 30));
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert!(
            parse_bytes("2 parsecs")
                .unwrap_err()
                .contains("unknown unit")
        );
        assert!(parse_bytes("-1").is_err());
        assert_eq!(parse_bytes("9007199254740993"), Ok(9_007_199_254_740_993));
        for large in ["18446744073709551616", "17179869184GiB", "99999999999.5GB"] {
            assert!(
                parse_bytes(large).unwrap_err().contains("more bytes"),
                "{large}"
            );
        }
        assert_eq!(parse_duration("30d"), Ok(Duration::from_secs(30 * 86400)));
        assert!(parse_duration("30").unwrap_err().contains("such as 30d"));
        assert!(parse_duration("1e300d").is_err());
    }
}
