// A receiver for event webhooks. It needs only the standard library.
//
// SERVICE_WEBHOOK_SECRET=whsec_… go run receiver.go [port]
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"time"
)

const (
	maxAge   = 5 * time.Minute
	maxBytes = 1 << 20
)

var digits = regexp.MustCompile(`^[0-9]{1,15}$`)

func genuine(secret []byte, headers http.Header, body []byte) bool {
	timestamp := headers.Get("X-Service-Timestamp")
	if !digits.MatchString(timestamp) {
		return false
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(timestamp + "."))
	mac.Write(body) // the bytes as received; re-encoded JSON would differ
	expected := "sha256=" + hex.EncodeToString(mac.Sum(nil))
	if !hmac.Equal([]byte(headers.Get("X-Service-Signature")), []byte(expected)) { // in constant time
		return false
	}
	milliseconds, _ := strconv.ParseInt(timestamp, 10, 64)
	age := time.Since(time.UnixMilli(milliseconds))
	return -maxAge <= age && age <= maxAge
}

func receive(secret []byte) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		if request.Method != http.MethodPost {
			response.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(response, request.Body, maxBytes))
		var tooLong *http.MaxBytesError
		switch {
		case errors.As(err, &tooLong):
			response.WriteHeader(http.StatusRequestEntityTooLarge)
			return
		case err != nil:
			response.WriteHeader(http.StatusBadRequest)
			return
		case !genuine(secret, request.Header, body):
			response.WriteHeader(http.StatusUnauthorized)
			return
		}
		response.WriteHeader(http.StatusNoContent)
		response.(http.Flusher).Flush() // respond immediately: after 5 s, the delivery fails
		var event struct {
			ID   string
			Type string
			Data json.RawMessage
		}
		if err := json.Unmarshal(body, &event); err != nil {
			log.Print(err)
			return
		}
		// The same id can arrive twice. If an event must be processed only once, remember its id.
		fmt.Println(event.ID, event.Type, string(event.Data))
	}
}

func main() {
	secret := os.Getenv("SERVICE_WEBHOOK_SECRET")
	if secret == "" {
		log.Fatal("SERVICE_WEBHOOK_SECRET is not set")
	}
	port := "3000"
	if len(os.Args) > 1 {
		port = os.Args[1]
	}
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("listening on", port)
	server := http.Server{Handler: receive([]byte(secret)), ReadTimeout: 10 * time.Second}
	log.Fatal(server.Serve(listener))
}
