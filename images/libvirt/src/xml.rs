//! Reads elements of an XML document. It supports what libvirt and its users write: elements,
//! attributes, text, comments, CDATA and the named and numbered characters. A document type is
//! refused.

use crate::XmlError;

/// Elements that may be open at once.
const MOST_OPEN: usize = 256;

/// Maximum length of a character's name or number, bytes: that of the largest number with four
/// leading zeros. Without a limit each `&` would cost a search of the whole text.
const LONGEST_NAME: usize = "#x000010ffff".len();

/// An element with its attributes and children.
#[derive(Debug)]
pub(crate) struct Element<'a> {
    pub(crate) name: &'a str,
    attributes: &'a str,
    pub(crate) text: String,
}

impl Element<'_> {
    /// Value of an attribute.
    pub(crate) fn attribute(&self, name: &str) -> Option<String> {
        let mut rest = self.attributes.trim_start();
        while let Some((key, value)) = rest.split_once('=') {
            let value = value.trim_start();
            let quote = value.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
            let (value, after) = value[1..].split_once(quote)?;
            if key.trim() == name {
                return Some(decoded(value));
            }
            rest = after.trim_start();
        }
        None
    }
}

/// Calls `on` at the end of each element, with the elements that are open, the ended one last.
pub(crate) fn visit<'a>(xml: &'a str, mut on: impl FnMut(&[Element<'a>])) -> Result<(), XmlError> {
    let mut open: Vec<Element<'a>> = Vec::new();
    let mut rest = xml;
    while !rest.is_empty() {
        let at = xml.len() - rest.len();
        let bad = XmlError::Syntax(at);
        let Some(tag) = rest.strip_prefix('<') else {
            let end = rest.find('<').unwrap_or(rest.len());
            if let Some(element) = open.last_mut() {
                element.text += &decoded(&rest[..end]);
            }
            rest = &rest[end..];
            continue;
        };
        if let Some(comment) = tag.strip_prefix("!--") {
            rest = behind(comment, "-->").ok_or(bad)?.1;
        } else if let Some(raw) = tag.strip_prefix("![CDATA[") {
            let (raw, after) = behind(raw, "]]>").ok_or(bad)?;
            if let Some(element) = open.last_mut() {
                element.text += raw;
            }
            rest = after;
        } else if let Some(instruction) = tag.strip_prefix('?') {
            rest = behind(instruction, "?>").ok_or(bad)?.1;
        } else if let Some(end) = tag.strip_prefix('/') {
            let (name, after) = behind(end, ">").ok_or(bad.clone())?;
            if open.last().is_none_or(|element| element.name != name.trim_end()) {
                return Err(bad);
            }
            on(&open);
            open.pop();
            rest = after;
        } else {
            let (tag, after) = tag.split_at(end_of_tag(tag).ok_or(bad.clone())?);
            let (tag, is_empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
            let (name, attributes) = tag.split_once(char::is_whitespace).unwrap_or((tag, ""));
            if name.is_empty() || name.starts_with('!') {
                return Err(bad);
            }
            if open.len() == MOST_OPEN {
                return Err(XmlError::Deep);
            }
            open.push(Element { name, attributes, text: String::new() });
            if is_empty {
                on(&open);
                open.pop();
            }
            rest = &after[1..];
        }
    }
    open.is_empty().then_some(()).ok_or(XmlError::Syntax(xml.len()))
}

/// The parts before and after the first `mark`.
fn behind<'a>(text: &'a str, mark: &str) -> Option<(&'a str, &'a str)> {
    text.split_once(mark)
}

/// Offset of the `>` that ends a tag. An attribute's value may contain a `>`, too.
fn end_of_tag(tag: &str) -> Option<usize> {
    let mut quote = None;
    tag.bytes().position(|byte| {
        match (quote, byte) {
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), _) if open == byte => quote = None,
            _ => {}
        }
        quote.is_none() && byte == b'>'
    })
}

/// Replaces named and numbered characters in a text. Unknown ones stay.
fn decoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        out += before;
        rest = after;
        let near = &after.as_bytes()[..after.len().min(LONGEST_NAME + 1)];
        let end = near.iter().position(|&byte| byte == b';');
        match end.and_then(|end| Some((named(&after[..end])?, &after[end + 1..]))) {
            Some((character, after)) => {
                out.push(character);
                rest = after;
            }
            None => out.push('&'),
        }
    }
    out + rest
}

fn named(name: &str) -> Option<char> {
    match name {
        "lt" => Some('<'),
        "gt" => Some('>'),
        "amp" => Some('&'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => {
            let number = name.strip_prefix('#')?;
            let number = match number.strip_prefix('x') {
                Some(hexadecimal) => u32::from_str_radix(hexadecimal, 16),
                None => number.parse(),
            };
            char::from_u32(number.ok()?)
        }
    }
}

/// Replaces the characters that have a meaning in XML.
pub(crate) fn encoded(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Path and text of each element, in the order of their ends.
    fn all(xml: &str) -> Result<Vec<(String, String)>, XmlError> {
        let mut found = Vec::new();
        visit(xml, |open| {
            let path: Vec<&str> = open.iter().map(|element| element.name).collect();
            found.push((path.join("/"), open.last().unwrap().text.clone()));
        })?;
        Ok(found)
    }

    #[test]
    fn elements_have_their_own_text() {
        let xml =
            "<?xml version='1.0'?>\n<!-- a > b <c> --><a x='1>0' y=\"it's\"><b>1 &lt; 2</b>own\
                   <c/><d ><![CDATA[<raw>&amp;]]></d >&#65;&#x42;</a>\n";
        let found = all(xml).unwrap();
        let expected = [("a/b", "1 < 2"), ("a/c", ""), ("a/d", "<raw>&amp;"), ("a", "ownAB")];
        assert_eq!(found, expected.map(|(path, text)| (path.into(), text.into())));
        visit(xml, |open| {
            let element = open.last().unwrap();
            if element.name == "a" {
                assert_eq!(element.attribute("x").as_deref(), Some("1>0"));
                assert_eq!(element.attribute("y").as_deref(), Some("it's"));
                assert_eq!(element.attribute("z"), None);
            }
        })
        .unwrap();
    }

    #[test]
    fn what_is_no_xml_is_refused() {
        for bad in
            ["<a>", "<a></b>", "</a>", "<a", "<a x='>", "<!DOCTYPE a><a/>", "<>", "<a><!-- </a>"]
        {
            assert!(matches!(all(bad), Err(XmlError::Syntax(_))), "{bad}");
        }
        assert_eq!(all(&"<a>".repeat(300)), Err(XmlError::Deep));
        assert_eq!(all("").unwrap(), []);
    }

    #[test]
    fn unknown_characters_stay() {
        assert_eq!(decoded("a &nbsp; b & c &#xffffffff; &amp"), "a &nbsp; b & c &#xffffffff; &amp");
        assert_eq!(decoded(&encoded("a<b>&c")), "a<b>&c");
    }

    #[test]
    fn a_number_with_leading_zeros_is_a_character() {
        assert_eq!(decoded("&#x000010ffff;&#x41;&#065;"), "\u{10ffff}AA");
        // The search for the end stops inside a character.
        let text = "&".to_owned() + &"\u{e4}".repeat(20) + ";";
        assert_eq!(decoded(&text), text);
    }

    /// Regression: each of the characters cost a search of the whole rest of the text. All of them
    /// together took minutes.
    #[test]
    fn a_text_of_ampersands_is_read_in_one_pass() {
        let text = "&".repeat(4 << 20);
        let found = all(&format!("<a>{text}</a>")).unwrap();
        assert!(found.len() == 1 && found[0].1 == text);
    }

    #[test]
    fn any_bytes_are_elements_or_an_error() {
        let xml = "<a x='1'><b>&lt;</b><!-- c --><![CDATA[d]]></a>";
        for cut in 0..xml.len() {
            let _ = all(&xml[..cut]);
            for byte in [b'<', b'>', b'\'', b'&', b'/', b'!', 0xc3] {
                let mut bent = xml.as_bytes().to_vec();
                bent[cut] = byte;
                let _ = all(&String::from_utf8_lossy(&bent));
            }
        }
    }
}
