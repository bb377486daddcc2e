//! Tests of reading and writing weights in one binary, because linking each binary costs seconds.

mod files;
mod gguf;
mod keys;
mod oracle;
mod quantized;
mod quantizer;
mod reader;
mod strict;
mod support;
mod writer;
