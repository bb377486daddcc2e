//! The key of a training call's random numbers, as Python gives it.

use crate::errors::Failure;
use moesaic::RngKey;
use pyo3::prelude::*;

/// A key from Python's (seed, step, layer, first token).
#[derive(Clone, Copy)]
pub struct Key(pub RngKey);

impl<'a, 'py> FromPyObject<'a, 'py> for Key {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Key> {
        let Ok((seed, step, layer, first_token)) = object.extract::<(u64, u64, u64, u64)>() else {
            let problem = "rng_key is (seed, step, layer, first token), four whole numbers from 0 \
                           to 2^64 - 1";
            return Err(Failure::Invalid(problem.to_string()).into());
        };
        Ok(Key(RngKey {
            seed,
            step,
            layer,
            first_token,
        }))
    }
}
