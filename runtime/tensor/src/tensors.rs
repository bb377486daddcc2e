//! Tensors by name.

use crate::{Element, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::{IntoIter, Iter, IterMut};
use std::ops::{Deref, DerefMut};

/// Tensors by name, in a sorted map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tensors<'a>(BTreeMap<String, Tensor<'a>>);

impl<'a> Tensors<'a> {
    /// Returns an empty map.
    pub fn new() -> Tensors<'a> {
        Tensors::default()
    }

    /// Adds a tensor that borrows `data`.
    pub fn with<E: Element>(mut self, name: &str, shape: &[usize], data: &'a [E]) -> Tensors<'a> {
        self.insert(name, Tensor::new(shape, data));
        self
    }

    /// Adds or replaces a tensor, and returns the replaced one.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor<'a>) -> Option<Tensor<'a>> {
        self.0.insert(name.into(), tensor)
    }

    /// Borrows the same tensors, without a copy.
    pub fn lend(&self) -> Tensors<'_> {
        let each = self.iter();
        each.map(|(name, tensor)| (name.clone(), tensor.lend()))
            .collect()
    }
}

impl<'a> Deref for Tensors<'a> {
    type Target = BTreeMap<String, Tensor<'a>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Tensors<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl<'a, N: Into<String>> FromIterator<(N, Tensor<'a>)> for Tensors<'a> {
    fn from_iter<I: IntoIterator<Item = (N, Tensor<'a>)>>(list: I) -> Tensors<'a> {
        let named = list.into_iter().map(|(name, tensor)| (name.into(), tensor));
        Tensors(named.collect())
    }
}

impl<'a, N: Into<String>, const COUNT: usize> From<[(N, Tensor<'a>); COUNT]> for Tensors<'a> {
    fn from(list: [(N, Tensor<'a>); COUNT]) -> Tensors<'a> {
        list.into_iter().collect()
    }
}

impl<'a> IntoIterator for Tensors<'a> {
    type Item = (String, Tensor<'a>);
    type IntoIter = IntoIter<String, Tensor<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'t, 'a> IntoIterator for &'t Tensors<'a> {
    type Item = (&'t String, &'t Tensor<'a>);
    type IntoIter = Iter<'t, String, Tensor<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'t, 'a> IntoIterator for &'t mut Tensors<'a> {
    type Item = (&'t String, &'t mut Tensor<'a>);
    type IntoIter = IterMut<'t, String, Tensor<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut()
    }
}
