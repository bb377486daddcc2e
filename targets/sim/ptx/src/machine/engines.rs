//! engines
use super::Machine;
use super::run::Flow;
use super::warp::{Group, Warp};
use crate::code::op::{Bulk, TensorCopy, Wgmma};
use crate::finding::{Fault, FindingKind, Step};

fn none() -> Step<Flow> {
    Err(Fault::new(FindingKind::Operand, 0, "not built yet"))
}

impl Machine<'_> {
    pub fn engines(&mut self, _force: bool) -> Step<bool> {
        Ok(false)
    }
    pub fn finish(&mut self) -> Result<(), (usize, Box<Fault>)> {
        Ok(())
    }
    pub fn engine_done(&self, _number: usize, _group: &Group) -> bool {
        true
    }
    pub fn bulk(&mut self, _w: &mut Warp, _b: &Bulk, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn tensor_copy(&mut self, _w: &mut Warp, _b: &TensorCopy, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn bulk_commit(&mut self, _w: &mut Warp, _mask: u32) {}
    pub fn bulk_wait(&mut self, _w: &mut Warp, _l: u32, _r: bool, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn wgmma(&mut self, _w: &mut Warp, _op: &Wgmma, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn wgmma_fence(&mut self, _w: &mut Warp, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn wgmma_commit(&mut self, _w: &mut Warp, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn wgmma_wait(&mut self, _w: &mut Warp, _l: u32, _mask: u32) -> Step<Flow> {
        none()
    }
    pub fn end_engines(&mut self, _w: &mut Warp, _mask: u32) -> Step<()> {
        Ok(())
    }
}
