//! Small remembered facts, such as the version of a compiler.

use crate::files::{self, Care};
use crate::{Store, StoreError, hash, store};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Serialize, Deserialize)]
struct Fact<N, V> {
    name: N,
    value: V,
}

impl Store {
    /// Returns the fact called `name`, or `None` if it is missing or not readable as a `T`. A name
    /// is any text, such as `compiler /usr/bin/cc`.
    #[doc(hidden)]
    pub fn fact<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        if self.trouble().is_some() {
            return None;
        }
        let bytes = store::read(&self.fact_path(name)).ok()?;
        let fact: Fact<String, T> = serde_json::from_slice(&bytes).ok()?;
        (fact.name == name).then_some(fact.value)
    }

    /// Remembers a fact. Store only facts that are cheap to find out again.
    ///
    /// # Errors
    /// [`StoreError`], which you can ignore.
    #[doc(hidden)]
    pub fn remember<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        if let Some(trouble) = self.trouble() {
            return Err(trouble);
        }
        let path = self.fact_path(name);
        let bytes = serde_json::to_vec_pretty(&Fact { name, value })
            .map_err(|error| StoreError::io("encode", &path, error.into()))?;
        files::write(&self.layout, &path, &bytes, Care::Quick)
    }

    fn fact_path(&self, name: &str) -> PathBuf {
        let hex = hash::to_hex(&hash::of([name.as_bytes()]));
        self.layout.facts().join(format!("{}.json", &hex[..32]))
    }
}
