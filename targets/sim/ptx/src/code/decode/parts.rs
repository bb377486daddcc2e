//! The modifiers of an opcode, taken one by one.

use super::Number;

/// The modifiers that nobody has taken yet.
pub struct Modifiers<'a> {
    left: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    pub fn new(parts: &'a [String]) -> Modifiers<'a> {
        Modifiers {
            left: parts.iter().map(String::as_str).collect(),
        }
    }

    /// Takes a modifier if it is there.
    pub fn flag(&mut self, name: &str) -> bool {
        let at = self.left.iter().position(|part| *part == name);
        at.map(|at| self.left.remove(at)).is_some()
    }

    /// Takes the first of these that is there.
    pub fn one_of<T: Copy>(&mut self, names: &[(&str, T)]) -> Option<T> {
        let found = names.iter().find(|(name, _)| self.flag(name));
        found.map(|(_, value)| *value)
    }

    /// Takes the first type.
    pub fn number(&mut self) -> Option<Number> {
        let at = self
            .left
            .iter()
            .position(|part| Number::named(part).is_some())?;
        Number::named(self.left.remove(at))
    }

    /// Takes the first part that starts with `prefix`, and returns the rest.
    pub fn prefixed(&mut self, prefix: &str) -> Option<&'a str> {
        let at = self.left.iter().position(|part| part.starts_with(prefix))?;
        self.left.remove(at).strip_prefix(prefix)
    }

    /// Returns true if the first type is a floating-point one.
    pub fn float_type(&self) -> bool {
        self.left.iter().any(|part| {
            matches!(*part, "f16x2" | "bf16x2") || Number::named(part).is_some_and(Number::is_float)
        })
    }

    /// Takes the modifiers that give cache hints.
    pub fn cache_hints(&mut self) {
        self.left.retain(|part| {
            let hint = matches!(*part, "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt");
            !hint && !part.starts_with("L1::") && !part.starts_with("L2::")
        });
    }

    /// Returns the first modifier that nobody took.
    pub fn left(&self) -> Option<&'a str> {
        self.left.first().copied()
    }
}
