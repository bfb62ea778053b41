//! Interchange with QEMU's `qatzip` method: packets as its multifd makes and reads them, by the
//! real QATzip called as `migration/multifd-qatzip.c` calls it, against our software.

#![expect(unsafe_code, reason = "calls QATzip as QEMU does; each block says why that is sound")]

mod abi;
mod lab;

use std::ffi::{c_int, c_uint};

use abi::{QzSession, QzSessionParamsDeflate};
use codec::{qz, Codec, Decoder, Encoded, Encoder, Settings, UnitHeader};
use lab::{alone, pages, Paths};
use libloading::os::unix::{Library, Symbol, RTLD_GLOBAL, RTLD_NOW};

type Compress = unsafe extern "C" fn(
    *mut QzSession,
    *const u8,
    *mut c_uint,
    *mut u8,
    *mut c_uint,
    c_uint,
) -> c_int;
type Decompress =
    unsafe extern "C" fn(*mut QzSession, *const u8, *mut c_uint, *mut u8, *mut c_uint) -> c_int;
type Bound = unsafe extern "C" fn(c_uint, *mut QzSession) -> c_uint;

/// QEMU's state of a channel.
struct Channel {
    session: Box<QzSession>,
    compress: Compress,
    decompress: Decompress,
    bound: Bound,
}

impl Channel {
    fn new(paths: &Paths, level: u32) -> Self {
        let files = ["libusdm.so.0", "libqat.so.4"].map(|name| paths.drivers.join(name));
        for path in files.iter().chain([&paths.qatzip]) {
            // SAFETY: libraries that the other tests load too.
            let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
            std::mem::forget(library.expect("the library loads"));
        }
        let init: abi::Init = find("qzInit");
        let defaults: abi::GetDefaultsDeflate = find("qzGetDefaultsDeflate");
        let setup: abi::SetupSessionDeflate = find("qzSetupSessionDeflate");
        let mut session = Box::new(QzSession {
            hw_session_stat: 0,
            thd_sess_stat: 0,
            internal: std::ptr::null_mut(),
            total_in: 0,
            total_out: 0,
        });
        // Software allowed, as QEMU has it.
        // SAFETY: a session that lives as long as the channel.
        let code = unsafe { init(&raw mut *session, 1) };
        assert!([abi::QZ_OK, abi::QZ_DUPLICATE].contains(&code), "qzInit: {code}");
        let mut params = QzSessionParamsDeflate::default();
        // SAFETY: the structure of qatzip.h.
        assert_eq!(unsafe { defaults(&raw mut params) }, abi::QZ_OK);
        params.common_params.comp_lvl = level;
        // SAFETY: as above.
        assert_eq!(unsafe { setup(&raw mut *session, &raw mut params) }, abi::QZ_OK);
        Self {
            session,
            compress: find("qzCompress"),
            decompress: find("qzDecompress"),
            bound: find("qzMaxCompressedLength"),
        }
    }

    /// Compresses a packet as QEMU does before it sends it: one call, with `last` set.
    fn send(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut consumed = c_uint::try_from(plain.len()).unwrap();
        // SAFETY: a session that was set up.
        let mut produced = unsafe { (self.bound)(consumed, &raw mut *self.session) };
        let mut out = vec![0; usize::try_from(produced).unwrap()];
        // SAFETY: lengths as given.
        let code = unsafe {
            (self.compress)(
                &raw mut *self.session,
                plain.as_ptr(),
                &raw mut consumed,
                out.as_mut_ptr(),
                &raw mut produced,
                1,
            )
        };
        assert_eq!((code, consumed as usize), (abi::QZ_OK, plain.len()));
        out.truncate(usize::try_from(produced).unwrap());
        out
    }

    /// Decompresses a packet: one call, which must return it whole.
    fn receive(&mut self, payload: &[u8], plain_len: usize) -> Vec<u8> {
        let mut consumed = c_uint::try_from(payload.len()).unwrap();
        let mut out = vec![0xdb; plain_len];
        let mut produced = c_uint::try_from(plain_len).unwrap();
        // SAFETY: lengths as given.
        let code = unsafe {
            (self.decompress)(
                &raw mut *self.session,
                payload.as_ptr(),
                &raw mut consumed,
                out.as_mut_ptr(),
                &raw mut produced,
            )
        };
        assert_eq!((code, consumed as usize), (abi::QZ_OK, payload.len()));
        assert_eq!(produced as usize, plain_len);
        out
    }
}

/// A function of QATzip, whose symbols are global. All callers are above, and the types of their
/// fields and variables match qatzip.h.
fn find<T: Copy>(name: &str) -> T {
    // SAFETY: see above; the library stays.
    let found: Result<Symbol<T>, _> = unsafe { Library::this().get(name) };
    *found.expect("QATzip has it")
}

/// Packets of 1 to 128 pages.
const PACKETS: [usize; 7] = [1, 2, 15, 16, 17, 100, 128];

fn exchange(paths: &Paths, members_of: impl Fn(usize) -> usize) {
    for level in [1, 3, 9] {
        let mut channel = Channel::new(paths, level);
        let mut decoder = Decoder::new();
        let settings = Settings::new(Codec::DeflateQz, i32::try_from(level).ok()).unwrap();
        let mut encoder = Encoder::new(settings).unwrap();
        for packet in PACKETS {
            let plain = pages(packet * 4096, u64::from(level));
            // QEMU sends, platen receives.
            let payload = channel.send(&plain);
            let members = qz::members(&payload, plain.len()).unwrap().count();
            assert_eq!(members, members_of(plain.len()), "level {level}, {packet} pages");
            let encoded = Encoded { codec: Codec::DeflateQz, len: payload.len() };
            let mut back = vec![0xdb; plain.len()];
            decoder.decode(&UnitHeader::of(&plain, encoded), &payload, &mut back).unwrap();
            assert!(back == plain, "level {level}, {packet} pages");
            // platen sends, QEMU receives.
            let mut out = vec![0; plain.len()];
            let encoded = encoder.encode(&plain, &mut out);
            assert_eq!(encoded.codec, Codec::DeflateQz);
            let back = channel.receive(&out[..encoded.len], plain.len());
            assert!(back == plain, "level {level}, {packet} pages");
        }
        // A chunk of platen's whose last member is shorter than QATzip passes to a device.
        let plain = pages(65_536 + 100, 5);
        let mut out = vec![0; plain.len()];
        let encoded = encoder.encode(&plain, &mut out);
        assert!(channel.receive(&out[..encoded.len], plain.len()) == plain);
    }
}

#[test]
fn packets_of_a_qemu_with_a_device() {
    alone("packets_of_a_qemu_with_a_device", "", |paths| {
        exchange(&paths, |len| len.div_ceil(qz::MEMBER_PLAIN));
    });
}

/// Without a device QEMU compresses in software, which makes one member of a whole packet.
#[test]
fn packets_of_a_qemu_without_a_device() {
    alone("packets_of_a_qemu_without_a_device", "absent", |paths| {
        exchange(&paths, |_| 1);
    });
}
