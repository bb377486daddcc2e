//! The day, for the names of results.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns today in UTC: `2026-02-28`.
pub fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    date_of(since.map_or(0, |since| since.as_secs() / 86_400))
}

/// Returns the date a number of days after 1970-01-01.
fn date_of(days: u64) -> String {
    let (mut year, mut left) = (1970, days);
    while left >= length(year) {
        left -= length(year);
        year += 1;
    }
    let mut month = 1;
    while left >= days_of(month, year) {
        left -= days_of(month, year);
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", left + 1)
}

const fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

const fn length(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

const fn days_of(month: u64, year: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_their_dates() {
        assert_eq!(date_of(0), "1970-01-01");
        assert_eq!(date_of(59), "1970-03-01");
        assert_eq!(date_of(11_016), "2000-02-29");
        assert_eq!(date_of(20_512), "2026-02-28");
        assert_eq!(date_of(20_513), "2026-03-01");
    }
}
