//! Layers and tensors of the interface, as C makes them.

use moesaic_c::Status;
use moesaic_c::calls::*;
use moesaic_c::engine::*;
use moesaic_c::layer::*;
use moesaic_c::options::LayerOptions;
use moesaic_c::spec::*;
use moesaic_c::status::moesaic_last_error;
use moesaic_c::tensors::{Dtype, Tensor};
use std::ffi::{CStr, CString, c_int};
use std::ptr::{null, null_mut};

pub const T: usize = 3;
pub const SPEC: &CStr = c"shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";

pub fn last() -> String {
    // SAFETY: the text is valid until the next failure of this thread.
    let text = unsafe { CStr::from_ptr(moesaic_last_error()) };
    text.to_str().unwrap().to_string()
}

#[track_caller]
pub fn ok(status: Status) {
    assert_eq!(status, Status::Ok, "{}", last());
}

/// Checks a refusal and the words of its text.
#[track_caller]
pub fn refused(status: Status, words: &str) {
    assert_eq!(status, Status::Invalid, "{}", last());
    assert!(last().contains(words), "`{}` lacks `{words}`", last());
}

/// A tensor with memory of its own.
pub struct Owned {
    pub name: CString,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    pub values: Vec<f32>,
}

impl Owned {
    pub fn new(name: &str, shape: &[i64], salt: usize) -> Owned {
        let count = shape.iter().product::<i64>() as usize;
        let value = |i: usize| ((i * 37 + salt * 11) % 64) as f32 / 64.0 - 0.5;
        Owned {
            name: CString::new(name).unwrap(),
            shape: shape.to_vec(),
            strides: Vec::new(),
            values: (0..count).map(value).collect(),
        }
    }

    /// Lays the rows `far` elements apart, with -1 between them.
    pub fn strided(mut self, far: usize) -> Owned {
        let width = self.shape[1] as usize;
        let mut values = vec![-1.0; self.shape[0] as usize * far];
        for (to, from) in values.chunks_mut(far).zip(self.values.chunks(width)) {
            to[..width].copy_from_slice(from);
        }
        (self.values, self.strides) = (values, vec![far as i64, 1]);
        self
    }

    pub fn c(&mut self) -> Tensor {
        Tensor {
            name: self.name.as_ptr(),
            data: self.values.as_mut_ptr().cast(),
            dtype: Dtype::F32 as c_int,
            dims: self.shape.len(),
            shape: self.shape.as_ptr(),
            strides: match self.strides.is_empty() {
                true => null(),
                false => self.strides.as_ptr(),
            },
        }
    }
}

pub struct Opened {
    pub engine: *mut Engine,
    pub spec: *mut Spec,
}

impl Opened {
    pub fn new(toml: &CStr) -> Opened {
        let options = EngineOptions {
            target: c"cpu".as_ptr(),
            threads: 2,
            ..EngineOptions::default()
        };
        let mut opened = Opened {
            engine: null_mut(),
            spec: null_mut(),
        };
        // SAFETY: the pointers are valid.
        unsafe {
            ok(moesaic_engine_open(&options, &mut opened.engine));
            ok(moesaic_spec_from_toml(toml.as_ptr(), &mut opened.spec));
        }
        opened
    }

    pub fn weights(&self) -> Vec<Owned> {
        // SAFETY: the spec is live, and names end in NUL.
        let weight = |number| unsafe {
            let mut info = std::mem::MaybeUninit::uninit();
            ok(moesaic_spec_weight(self.spec, number, info.as_mut_ptr()));
            let info = info.assume_init();
            let name = CStr::from_ptr(info.name).to_str().unwrap();
            Owned::new(name, &info.shape[..info.dims], number + 1)
        };
        // SAFETY: the spec is live.
        let count = unsafe { moesaic_spec_weight_count(self.spec) };
        (0..count).map(weight).collect()
    }

    pub fn layer(&self, training: c_int) -> *mut Layer {
        let mut weights = self.weights();
        let tensors: Vec<Tensor> = weights.iter_mut().map(Owned::c).collect();
        let options = LayerOptions {
            training,
            ..LayerOptions::default()
        };
        let mut layer = null_mut();
        // SAFETY: the pointers are valid.
        ok(unsafe {
            let (engine, spec) = (self.engine, self.spec);
            moesaic_layer_open(
                engine,
                spec,
                tensors.as_ptr(),
                tensors.len(),
                &options,
                &mut layer,
            )
        });
        layer
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: nobody uses them any more.
        unsafe {
            moesaic_spec_free(self.spec);
            moesaic_engine_free(self.engine);
        }
    }
}

/// Makes a call with these tensors, which outlive it.
pub fn call_of(tokens: usize, tensors: &[Tensor]) -> Call {
    Call {
        tokens,
        tensors: tensors.as_ptr(),
        tensor_count: tensors.len(),
        capacity_factor: 0.0,
    }
}

pub fn forward(layer: *const Layer, tokens: usize, tensors: &[Tensor]) -> Status {
    let call = call_of(tokens, tensors);
    // SAFETY: the tests pass valid tensors, or such as are refused.
    unsafe { moesaic_forward(layer, &call) }
}

pub fn rows(name: &str, salt: usize) -> Owned {
    Owned::new(name, &[T as i64, 8], salt)
}
