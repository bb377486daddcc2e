//! The choices of a layer.

use crate::ranks::Mesh;
use crate::status::Failure;
use moesaic::Recompute;
use moesaic::{LayerOptions as RustOptions, Training};
use std::ffi::c_int;

/// The memory that training may use: what is not kept, backward computes again, to the same bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Keep all that backward reads.
    All = 0,
    /// Compute the hidden values of experts again.
    NoHidden = 1,
    /// Compute the routing again, too.
    Inputs = 2,
}

/// The choices of a layer. All zero is a layer of one process for inference.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LayerOptions {
    /// Not 0: the layer can run moesaic_forward_train and moesaic_backward.
    pub training: c_int,
    /// A moesaic_keep, for training.
    pub keep: c_int,
    /// The ranks that share the layer; NULL is one process. All ranks of the mesh make the layer
    /// and every call, in the same order.
    pub mesh: *const Mesh,
    /// Not 0: `weights` are this rank's part: its own experts alone, by the same names.
    pub weights_are_part: c_int,
}

impl Default for LayerOptions {
    fn default() -> LayerOptions {
        LayerOptions {
            training: 0,
            keep: 0,
            mesh: std::ptr::null(),
            weights_are_part: 0,
        }
    }
}

impl LayerOptions {
    /// Returns the choices in Rust's words.
    ///
    /// # Safety
    /// `mesh` is NULL or live for `'a`.
    pub(crate) unsafe fn read<'a>(&self) -> Result<RustOptions<'a>, Failure> {
        let training = self.training()?;
        // SAFETY: the caller vouches for the mesh.
        let mesh = unsafe { self.mesh.as_ref() }.map(|mesh| &mesh.mesh);
        if mesh.is_none() && self.weights_are_part != 0 {
            let problem = "is for layers over ranks: leave it 0 without a mesh";
            return Err(Failure::argument("weights_are_part", problem));
        }
        Ok(RustOptions {
            training,
            mesh,
            part: self.weights_are_part != 0,
            ..RustOptions::default()
        })
    }

    fn training(&self) -> Result<Option<Training>, Failure> {
        let recompute = match self.keep {
            code if code == Keep::All as c_int => Recompute::None,
            code if code == Keep::NoHidden as c_int => Recompute::Hidden,
            code if code == Keep::Inputs as c_int => Recompute::All,
            code => {
                let problem = format!("is {code}, which is no moesaic_keep");
                return Err(Failure::argument("keep", problem));
            }
        };
        if self.training == 0 && recompute != Recompute::None {
            let problem = "is for layers that train: set `training`";
            return Err(Failure::argument("keep", problem));
        }
        Ok((self.training != 0).then_some(Training { recompute }))
    }
}
