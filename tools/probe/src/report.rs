//! Results as a table.

use std::fmt;

/// The outcome of a primitive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All cases gave the bits of the table.
    Agrees,
    /// The first case that did not agree.
    Differs(String),
    /// The probe did not finish.
    Failed(String),
    /// The device does not have the primitive.
    NotRun(String),
}

/// The result of one primitive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Name of the primitive.
    pub primitive: String,
    /// Number of cases.
    pub cases: usize,
    /// Outcome.
    pub outcome: Outcome,
}

/// All primitives on one device.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Results, in the order of the probes.
    pub rows: Vec<Row>,
}

impl Row {
    /// Returns a row for a primitive that the device does not have.
    pub fn not_run(primitive: impl Into<String>, reason: impl Into<String>) -> Row {
        Row {
            primitive: primitive.into(),
            cases: 0,
            outcome: Outcome::NotRun(reason.into()),
        }
    }

    /// Returns a row for a comparison: `Ok` when all cases agree, else the
    /// first that does not.
    pub fn compared(primitive: impl Into<String>, cases: usize, result: Result<(), String>) -> Row {
        Row {
            primitive: primitive.into(),
            cases,
            outcome: result.map_or_else(Outcome::Differs, |()| Outcome::Agrees),
        }
    }
}

impl Report {
    /// Returns true if nothing differed and nothing failed.
    pub fn is_clean(&self) -> bool {
        let bad = |row: &Row| matches!(row.outcome, Outcome::Differs(_) | Outcome::Failed(_));
        !self.rows.iter().any(bad)
    }

    /// Returns one line with the number of each outcome.
    pub fn summary(&self) -> String {
        let agree = self.count(|o| *o == Outcome::Agrees);
        let differ = self.count(|o| matches!(o, Outcome::Differs(_)));
        let failed = self.count(|o| matches!(o, Outcome::Failed(_)));
        let skipped = self.count(|o| matches!(o, Outcome::NotRun(_)));
        format!("{agree} agree, {differ} differ, {failed} failed, {skipped} not run")
    }

    fn count(&self, wanted: fn(&Outcome) -> bool) -> usize {
        self.rows.iter().filter(|row| wanted(&row.outcome)).count()
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, cases) = (&self.primitive, self.cases);
        match &self.outcome {
            Outcome::Agrees => write!(f, "{name:<44} {cases:>7}  agrees"),
            Outcome::Differs(how) => write!(f, "{name:<44} {cases:>7}  DIFFERS: {how}"),
            Outcome::Failed(why) => write!(f, "{name:<44} {cases:>7}  FAILED: {why}"),
            Outcome::NotRun(why) => write!(f, "{name:<44} {:>7}  not run: {why}", "-"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<44} {:>7}  result", "primitive", "cases")?;
        for row in &self.rows {
            writeln!(f, "{row}")?;
        }
        writeln!(f, "{}", self.summary())
    }
}

/// Compares words; an error names the first difference.
///
/// # Errors
/// A sentence with the place, the found word and the table's.
pub fn same(what: &str, got: &[u32], table: &[u32]) -> Result<(), String> {
    let differs = got.iter().zip(table).position(|(got, table)| got != table);
    match differs {
        None if got.len() == table.len() => Ok(()),
        None => Err(format!("{what}: {} words, not {}", got.len(), table.len())),
        Some(at) => Err(format!(
            "{what}, word {at}: {:#010x}, the table says {:#010x}",
            got[at], table[at]
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_and_not_clean() {
        assert_eq!(same("x", &[1, 2], &[1, 2]), Ok(()));
        let error = same("case 3", &[1, 5], &[1, 2]).unwrap_err();
        assert_eq!(
            error,
            "case 3, word 1: 0x00000005, the table says 0x00000002"
        );
        assert!(same("x", &[1], &[1, 2]).is_err());
        let rows = |outcome| Report {
            rows: vec![Row {
                primitive: "mma".into(),
                cases: 2,
                outcome,
            }],
        };
        assert!(rows(Outcome::Agrees).is_clean());
        assert!(rows(Outcome::NotRun("sm_90 has it".into())).is_clean());
        assert!(!rows(Outcome::Differs(error)).is_clean());
        let failed = rows(Outcome::Failed("fault".into()));
        assert!(!failed.is_clean());
        assert!(
            failed
                .to_string()
                .ends_with("0 agree, 0 differ, 1 failed, 0 not run\n")
        );
    }
}
