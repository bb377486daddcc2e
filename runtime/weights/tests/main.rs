//! Tests of reading and writing weights in one binary, because linking each binary costs seconds.

#[path = "../../../tests/oracle/archive.rs"]
mod archive;
mod files;
mod gguf;
mod keys;
mod oracle;
mod packers;
mod quantize;
mod quantize_hostile;
mod quantized;
mod quantizer;
mod reader;
mod served;
mod stored;
mod strict;
mod support;
mod writer;
