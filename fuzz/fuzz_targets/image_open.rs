//! The image of a saved VM: any file is read or refused, and the file's length bounds the memory.
//!
//! Input: one byte. If it is 0, the rest is the file. Otherwise the rest is two lengths of two
//! bytes (units, state), then units, state and index; the target adds header, trailer and valid
//! checksums, so that inputs get past them.
#![no_main]

use std::fs::File;
use std::io::Write;
use std::sync::Arc;

use image::{Content, Image, Units};
use libfuzzer_sys::fuzz_target;
use player::{plain, PlainOptions, Reader};

fn sealed(input: &[u8]) -> Option<Vec<u8>> {
    let (head, rest) = input.split_first_chunk::<4>()?;
    let len = |a, b| usize::from(u16::from_be_bytes([head[a], head[b]])).min(rest.len());
    let (units, rest) = rest.split_at(len(0, 1));
    let (state, index) = rest.split_at(len(2, 3).min(rest.len()));
    let mut file = b"PLATENVM\0\0\0\x01\0\0\x10\0\0\0\0\x10".to_vec();
    file.resize(56, 0);
    file.extend(codec::checksum(&file).to_be_bytes());
    file.extend(units);
    let mut trailer = b"PLATENVE\0\0\0\x01\0\0\0\0".to_vec();
    for part in [state, index] {
        for word in [file.len() as u64, part.len() as u64, codec::checksum(part)] {
            trailer.extend(word.to_be_bytes());
        }
        file.extend(part);
    }
    trailer.extend((file.len() as u64 + 96).to_be_bytes());
    // The hash over the file, which only `verify` computes.
    trailer.extend([0; 16]);
    trailer.extend(codec::checksum(&trailer).to_be_bytes());
    file.extend(trailer);
    Some(file)
}

fuzz_target!(|input: &[u8]| {
    let Some((mode, rest)) = input.split_first() else { return };
    let Some(bytes) = (if *mode == 0 { Some(rest.to_vec()) } else { sealed(rest) }) else { return };
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create(c"image", flags).expect("a memfd"));
    file.write_all(&bytes).expect("memory");
    let Ok(image) = Image::over(file) else { return };
    let shape = image.shape();
    let mut plain_bytes = vec![0; shape.unit_bytes()];
    for unit in 0..image.index().units.len() as u64 {
        let _ = Units::new().read(&image, unit, &mut plain_bytes);
    }
    for block in &image.index().blocks {
        // The extents cover the block, and refer to slots that exist.
        let mut next = 0;
        for extent in &block.extents {
            assert!(extent.first == next && extent.pages > 0);
            next += extent.pages;
            if let Content::Slot(slot) = extent.content {
                assert!(slot + extent.pages <= image.index().slots);
            }
        }
        assert_eq!(next, block.pages);
    }
    if image.ram_bytes() < 1 << 24 {
        let how = PlainOptions { threads: 1, reader: Reader::Qemu, runs: false };
        let _ = plain(&Arc::new(image), &mut std::io::sink(), how);
    }
});
