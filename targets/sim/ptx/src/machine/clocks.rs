//! hooks
use super::Machine;
use super::warp::{Warp, Words};
use crate::finding::Step;

impl Machine<'_> {
    pub fn clock_arrive(&mut self, _warp: &mut Warp, _block: usize, _id: u32, _mask: u32) {}
    pub fn clock_complete(&mut self, _warp: &mut Warp, _block: usize, _id: u32) {}
    pub fn warp_barrier(&mut self, _warp: &mut Warp, _mask: u32, _named: &Words) {}
    pub fn cluster_arrive(&mut self, _warp: &mut Warp, _mask: u32) {}
    pub fn cluster_acquire(&mut self, _warp: &mut Warp, _mask: u32) {}
    pub fn written(&self, _block: usize, _offset: usize) -> bool {
        false
    }
    pub fn begin_mbarrier(
        &mut self,
        _w: &mut Warp,
        _b: usize,
        _o: usize,
        _lane: usize,
    ) -> Step<()> {
        Ok(())
    }
    pub fn use_mbarrier(&mut self, _w: &mut Warp, _b: usize, _o: usize, _lane: usize) -> Step<()> {
        Ok(())
    }
    pub fn mbarrier_release(&mut self, _w: &mut Warp, _b: usize, _o: usize, _lane: usize) {}
    pub fn mbarrier_acquire(&mut self, _w: &mut Warp, _b: usize, _o: usize, _lane: usize) {}
    pub fn mbarrier_phase(&mut self, _b: usize, _o: usize) {}
    pub fn copy_starts(
        &mut self,
        _w: &Warp,
        _b: usize,
        _o: usize,
        _n: usize,
        _lane: usize,
    ) -> Step<()> {
        Ok(())
    }
    pub fn copy_ends(&mut self, _w: &Warp, _b: usize, _o: usize, _n: usize, _lane: usize) {}
}
