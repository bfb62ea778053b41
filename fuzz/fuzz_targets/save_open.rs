//! A save of a store and its packs: any files are read or refused, and their lengths bound the
//! memory.
//!
//! Input: the number of packs; for each its name of 16 bytes, three lengths of two bytes (units,
//! hashes, index) and these parts; the length of the state, two bytes, the state, and the index of
//! the save. The target adds headers, trailers and valid checksums, so that inputs get past them.
#![no_main]

use std::fs::File;
use std::io::{Error, ErrorKind, Write};
use std::sync::Arc;

use image::{check_units, Content, Image, Units};
use libfuzzer_sys::fuzz_target;
use player::{plain, PlainOptions, Reader};

/// Takes bytes from the front of `input`.
fn take(input: &mut &[u8], len: usize) -> Vec<u8> {
    let (head, rest) = input.split_at(len.min(input.len()));
    *input = rest;
    head.to_vec()
}

/// Takes a number of two bytes.
fn number(input: &mut &[u8]) -> usize {
    take(input, 2).iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte))
}

/// A file of a header with this magic, `units`, two parts and a trailer that states `hash`.
fn sealed(magic: &[u8; 7], units: &[u8], parts: [&[u8]; 2], hash: &[u8]) -> File {
    let (head, version) = (if magic.ends_with(b"P") { b"K" } else { b"M" }, 2_u32.to_be_bytes());
    let mut file = [&magic[..], head, &version, b"\0\0\x10\0\0\0\0\x10"].concat();
    file.resize(56, 0);
    file.extend(codec::checksum(&file).to_be_bytes());
    file.extend(units);
    let mut trailer = [&magic[..], b"E", &version, &[0; 4]].concat();
    for part in parts {
        for word in [file.len() as u64, part.len() as u64, codec::checksum(part)] {
            trailer.extend(word.to_be_bytes());
        }
        file.extend(part);
    }
    trailer.extend((file.len() as u64 + 96).to_be_bytes());
    trailer.extend(hash);
    trailer.extend(codec::checksum(&trailer).to_be_bytes());
    file.extend(trailer);
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut memory = File::from(rustix::fs::memfd_create(c"image", flags).expect("a memfd"));
    memory.write_all(&file).expect("memory");
    memory
}

fuzz_target!(|input: &[u8]| {
    let input = &mut &input[..];
    let mut packs = Vec::new();
    let count = take(input, 1).first().map_or(0, |count| count % 4);
    for _ in 0..count {
        let mut id = take(input, 16);
        id.resize(16, 0);
        let lens = [number(input), number(input), number(input)];
        let [units, hashes, index] = lens.map(|len| take(input, len));
        packs.push((id.clone(), sealed(b"PLATENP", &units, [&hashes, &index], &id)));
    }
    let len = number(input);
    let state = take(input, len);
    let save = sealed(b"PLATENV", &[], [&state, input], &[0; 16]);
    let mut open = |id: u128| {
        let of = packs.iter().find(|(of, _)| of[..] == id.to_be_bytes());
        Ok(of.ok_or(Error::from(ErrorKind::NotFound))?.1.try_clone()?.into())
    };
    let Ok(image) = Image::with_packs(save, &mut open) else { return };
    let shape = image.shape();
    let mut plain_bytes = vec![0; shape.unit_bytes()];
    let mut units = Units::new();
    for unit in 0..image.index().units.len() as u64 {
        let _ = units.read(&image, unit, &mut plain_bytes);
    }
    let _ = check_units(&image, 1);
    for block in &image.index().blocks {
        // The extents cover the block, and refer to pages that exist.
        let mut next = 0;
        for extent in &block.extents {
            assert!(extent.first == next && extent.pages > 0);
            next += extent.pages;
            if let Content::Slot(slot) = extent.content {
                for slot in [slot, slot + extent.pages - 1] {
                    let pages = image.index().unit_pages(slot / shape.unit_pages());
                    assert!(slot % shape.unit_pages() < pages);
                }
            }
        }
        assert_eq!(next, block.pages);
    }
    if image.ram_bytes() < 1 << 24 {
        let how = PlainOptions { threads: 1, reader: Reader::Qemu, runs: false };
        let _ = plain(&Arc::new(image), &mut std::io::sink(), how);
    }
});
