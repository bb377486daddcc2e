//! Tests of reading and writing weights, one binary: each that is linked costs seconds.

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
