//! W23, W24, W11, W12: the effects of a bad network, before and after the STILL_OPEN that lets the
//! destination run.

use crate::harness::{
    assert_same, bounded, read_exactly, read_rest, readable, tag_at, Noise, Options, Receiving,
    Sending, A_WHILE, SILENCE, WATCHDOG,
};
use crate::identity::single;
use crate::proxy::{Proxy, Tamper};
use codec::Codec;
use relay::RelayError;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Both relays with a proxy in between, and a main stream of which the destination has read `read`
/// bytes.
struct Rig {
    proxy: Proxy,
    sending: Sending,
    receiving: Receiving,
    source: UnixStream,
    destination: UnixStream,
    sent: Vec<u8>,
}

/// `hears`: both relays lose links that are silent for [`session::SILENCE`].
fn rig(write: impl FnOnce(&[u8]) -> usize, links: u16, hears: bool) -> Rig {
    let sent = single(300).main;
    let (receiving, silence) = match hears {
        true => (Receiving::that_hears(Duration::ZERO), session::SILENCE),
        false => (Receiving::new(), SILENCE),
    };
    let listener = receiving.qemu(None);
    let proxy = Proxy::new(receiving.address, Tamper::Nothing);
    let options = Options { links, silence, ..Options::default() };
    let sending = Sending::new(&receiving, proxy.address, options);
    let source = sending.connect();
    let len = write(&sent);
    let (now, to) = (sent[..len].to_vec(), source.try_clone().unwrap());
    let writer = std::thread::spawn(move || (&to).write_all(&now).unwrap());
    let (destination, _) = listener.accept().unwrap();
    assert_same(&read_exactly(&destination, len), &sent[..len], "main");
    writer.join().unwrap();
    Rig { proxy, sending, receiving, source, destination, sent }
}

fn before_the_tail(harm: impl FnOnce(&Proxy), links: u16, hears: bool) {
    let rig = rig(|sent| sent.len() / 2, links, hears);
    let peer = rig.proxy.address.to_string();
    harm(&rig.proxy);
    assert_eq!(read_rest(&rig.source), b"", "QEMU's socket is closed, so the source VM goes on");
    assert_eq!(read_rest(&rig.destination), b"", "and that of the destination");
    let error = rig.sending.result().unwrap_err();
    assert!(matches!(error, RelayError::Ended(_)), "{error}");
    assert!(error.to_string().contains(&peer), "{error} does not name {peer}");
    rig.receiving.result().unwrap_err();
}

#[test]
fn a_link_cut_before_the_tail_frees_the_source() {
    bounded(|| {
        for links in [1, 4] {
            before_the_tail(Proxy::cut, links, false);
        }
    });
}

#[test]
fn a_network_that_drops_everything_before_the_tail_frees_the_source() {
    bounded(|| before_the_tail(Proxy::freeze, 2, true));
}

/// After STILL_OPEN: the relay decides nothing for the user.
fn after_still_open(harm: impl FnOnce(&Proxy), written: impl FnOnce(&[u8]) -> usize, hears: bool) {
    let rig = rig(written, 2, hears);
    harm(&rig.proxy);
    let notice = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
    assert!(notice.contains("Look at the destination"), "{notice}");
    // Further bytes of the source change nothing.
    let left = &rig.sent[rig.sent.len() - 60..];
    (&rig.source).write_all(left).unwrap();
    assert!(!readable(&rig.source, 2 * A_WHILE), "QEMU's socket was closed");
    assert!(rig.sending.is_running());
    assert!(rig.receiving.result().is_err());
    drop(rig.source);
    let error = rig.sending.result().unwrap_err();
    assert!(matches!(error, RelayError::InDoubt { .. }), "{error}");
}

#[test]
fn a_link_cut_after_still_open_holds_the_source_in_doubt() {
    bounded(|| after_still_open(Proxy::cut, <[u8]>::len, false));
}

#[test]
fn a_link_cut_right_behind_the_tag_holds_the_source_in_doubt() {
    bounded(|| after_still_open(Proxy::cut, |sent| tag_at(sent) + 1, false));
}

#[test]
fn a_network_that_drops_everything_after_still_open_holds_the_source_in_doubt() {
    bounded(|| after_still_open(Proxy::freeze, <[u8]>::len, true));
}

/// A frame tampered with ends the migration; the bytes delivered until then are right. Returns the
/// destination relay's error.
fn tampered(tamper: Tamper, codec: Codec) -> String {
    // Incompressible, so that a flipped bit is a bit of a page.
    let mut noise = Noise(11);
    let pages: Vec<_> = (0..2000).map(|_| noise.bytes(4096)).collect();
    let sent = stream::synth::main_stream(stream::synth::Style::Qemu92, 4096, &pages);
    let receiving = Receiving::new();
    let listener = receiving.qemu(None);
    let proxy = Proxy::new(receiving.address, tamper);
    let options = Options { codec, links: 1, ..Options::default() };
    let sending = Sending::new(&receiving, proxy.address, options);
    let source = sending.connect();
    let bytes = sent.clone();
    let writer = std::thread::spawn(move || {
        let _ = (&source).write_all(&bytes);
        assert_eq!(read_rest(&source), b"");
    });
    let at = listener.local_addr().unwrap();
    let destination = std::thread::spawn(move || read_rest(&listener.accept().unwrap().0));
    writer.join().unwrap();
    sending.result().unwrap_err();
    let error = receiving.result().unwrap_err().to_string();
    // A relay that noticed the damage before it delivered anything never connected: this connects
    // in its place.
    drop(UnixStream::connect_addr(&at));
    let got = destination.join().unwrap();
    assert_same(&got, &sent[..got.len()], "what was delivered");
    assert!(got.len() < tag_at(&sent), "the tag was delivered");
    error
}

#[test]
fn a_flipped_bit_is_never_delivered() {
    bounded(|| {
        for codec in [Codec::Raw, Codec::Zstd] {
            let error = tampered(Tamper::Flip(3), codec);
            assert!(error.contains("hash") || error.contains("decoded"), "{error}");
        }
    });
}

#[test]
fn nothing_is_delivered_over_a_hole() {
    bounded(|| {
        // The relay waits for the frame until the source has used up its credit; cutting the link
        // ends that.
        let mut noise = Noise(12);
        let pages: Vec<_> = (0..2000).map(|_| noise.bytes(4096)).collect();
        let sent = stream::synth::main_stream(stream::synth::Style::Qemu92, 4096, &pages);
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let proxy = Proxy::new(receiving.address, Tamper::Drop(3));
        let options = Options { links: 1, ..Options::default() };
        let sending = Sending::new(&receiving, proxy.address, options);
        let source = sending.connect();
        let (bytes, to) = (sent.clone(), source.try_clone().unwrap());
        let writer = std::thread::spawn(move || {
            let _ = (&to).write_all(&bytes);
        });
        let (destination, _) = listener.accept().unwrap();
        let mut got = 0;
        while readable(&destination, 3 * A_WHILE) {
            let mut piece = vec![0; 65536];
            let n = std::io::Read::read(&mut &destination, &mut piece).unwrap();
            if n == 0 {
                // The session has ended before nothing came for so long.
                break;
            }
            assert_same(&piece[..n], &sent[got..got + n], "what was delivered");
            got += n;
        }
        proxy.cut();
        writer.join().unwrap();
        // Bytes that a slow relay had not delivered yet are before the hole too.
        let rest = read_rest(&destination);
        assert_same(&rest, &sent[got..got + rest.len()], "what was delivered");
        got += rest.len();
        assert!(got < sent.len() / 2, "{got} bytes came although a frame is missing");
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}
