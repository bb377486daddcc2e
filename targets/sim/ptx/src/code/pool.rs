//! Rows behind the registers.

use super::op::RowIndex;
use crate::text::Special;
use std::collections::HashMap;

/// The content of a row behind the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowValue {
    Literal(u64),
    Special(Special),
}

/// Rows for literals and special registers, handed out on first use.
#[derive(Default)]
pub struct Pool {
    first: RowIndex,
    pub sources: Vec<RowValue>,
    known: HashMap<RowValue, RowIndex>,
}

impl Pool {
    pub fn new(first: RowIndex) -> Pool {
        Pool {
            first,
            ..Pool::default()
        }
    }

    /// Returns the row that holds `source`.
    pub fn row(&mut self, source: RowValue) -> RowIndex {
        let next = self.first + self.sources.len() as RowIndex;
        *self.known.entry(source).or_insert_with(|| {
            self.sources.push(source);
            next
        })
    }
}
