//! The names that the statements of a kernel may use.

use super::{Operand, Virtual};
use std::collections::HashMap;

/// The names of one pair of braces. Inline assembly opens its own pair.
#[derive(Default)]
pub struct Scope {
    pub registers: HashMap<String, Virtual>,
    /// Families `%r<n>`: every name with the prefix and a number below n.
    pub families: Vec<(String, Virtual, u32)>,
    pub labels: HashMap<String, usize>,
    pub tables: HashMap<String, Vec<String>>,
    pub variables: HashMap<String, usize>,
    parent: usize,
}

/// The open and closed scopes of a kernel, and its parameters.
pub struct Names {
    params: HashMap<String, u32>,
    scopes: Vec<Scope>,
    /// Innermost open scope.
    current: usize,
}

impl Names {
    /// Returns the names of a kernel: its parameters by their offsets, and the variables of its
    /// module by their numbers.
    pub fn new(
        params: Vec<(String, u32)>,
        variables: impl Iterator<Item = (String, usize)>,
    ) -> Names {
        let outer = Scope {
            variables: variables.collect(),
            ..Scope::default()
        };
        Names {
            params: params.into_iter().collect(),
            scopes: vec![outer],
            current: 0,
        }
    }

    pub fn open(&mut self) {
        self.scopes.push(Scope {
            parent: self.current,
            ..Scope::default()
        });
        self.current = self.scopes.len() - 1;
    }

    pub fn close(&mut self) {
        self.current = self.scopes[self.current].parent;
    }

    /// Returns the number of the innermost open scope.
    pub fn current(&self) -> usize {
        self.current
    }

    /// Returns the innermost open scope, for a declaration.
    pub fn scope(&mut self) -> &mut Scope {
        &mut self.scopes[self.current]
    }

    /// Finds something in a scope, or else in those around it.
    pub fn enclosing<T>(&self, from: usize, find: impl Fn(&Scope) -> Option<T>) -> Option<T> {
        let mut at = from;
        loop {
            let scope = &self.scopes[at];
            if let Some(found) = find(scope) {
                return Some(found);
            }
            if at == 0 {
                return None;
            }
            at = scope.parent;
        }
    }

    /// Returns the register of this name, innermost scope first.
    pub fn register(&self, name: &str) -> Option<Virtual> {
        self.enclosing(self.current, |scope| {
            scope.registers.get(name).copied().or_else(|| {
                scope.families.iter().find_map(|(prefix, first, count)| {
                    let number: u32 = name.strip_prefix(prefix.as_str())?.parse().ok()?;
                    (number < *count).then_some(Virtual {
                        index: first.index + number,
                        ..*first
                    })
                })
            })
        })
    }

    /// Returns the address of a variable or a parameter.
    pub fn symbol(&self, name: &str) -> Option<Operand> {
        if let Some(offset) = self.params.get(name) {
            return Some(Operand::Parameter(*offset));
        }
        self.enclosing(self.current, |scope| scope.variables.get(name).copied())
            .map(Operand::Variable)
    }
}
