// Command spec compares a compiled csi.proto with the CSI standard.
//
// Its argument is a FileDescriptorSet as protoc writes it:
//
//	protoc -I proto --include_imports --descriptor_set_out=FILE csi.proto
//	go run . FILE
//
// The file of package csi.v1 in that set is compared with the descriptor
// embedded in the standard's Go module, at the version go.mod pins. Nothing
// but comments, the file's name and the order of declarations may differ.
//
// Exit status: 0 if the two are identical, 1 if they differ, with one line per
// difference, and 2 if there was nothing to compare.
package main

import (
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
)

// The package of the file to compare.
const csiPackage = "csi.v1"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: spec DESCRIPTOR_SET_FILE")
		os.Exit(2)
	}
	ours, err := load(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "spec:", err)
		os.Exit(2)
	}
	differences := compare(ours, standard())
	for _, d := range differences {
		fmt.Println(d)
	}
	if len(differences) > 0 {
		os.Exit(1)
	}
	fmt.Printf("%s: identical\n", count(ours))
}

// load reads a FileDescriptorSet and returns its file of package csi.v1.
//
// The file is only decoded, never registered: the global registry already
// holds the standard's, and could not take a second one of the same names. It
// is what makes the standard's own options known to the decoder.
func load(path string) (*descriptorpb.FileDescriptorProto, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(data, &set); err != nil {
		return nil, fmt.Errorf("%s: not a descriptor set: %w", path, err)
	}
	var found *descriptorpb.FileDescriptorProto
	for _, file := range set.GetFile() {
		if file.GetPackage() != csiPackage {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%s: two files of package %s: %s and %s",
				path, csiPackage, found.GetName(), file.GetName())
		}
		found = file
	}
	if found == nil {
		return nil, fmt.Errorf("%s: no file of package %s", path, csiPackage)
	}
	return found, nil
}

// standard returns the descriptor of the standard's own csi.proto.
func standard() *descriptorpb.FileDescriptorProto {
	return protodesc.ToFileDescriptorProto(csi.File_csi_proto)
}
